"""Telemetry over MQTT: what is said, kept until a broker has it, and sent (docs/mqtt.md)."""
