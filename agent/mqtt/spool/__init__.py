"""Messages wait here, on disk, until a broker has them: nothing acknowledged is lost, every loss is explained."""
