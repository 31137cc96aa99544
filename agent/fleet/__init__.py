"""What the agent says to a fleet's operator, and does for him, over MQTT: between the gateway and `agent.mqtt`."""
