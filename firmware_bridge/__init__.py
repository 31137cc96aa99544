"""A serial microcontroller joins in: framed link, session and simulator."""
