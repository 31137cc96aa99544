"""What one client may use of the agent: pure policies, with the time as an argument."""
