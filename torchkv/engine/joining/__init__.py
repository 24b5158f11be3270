"""How a rank takes part: what it registers and publishes, whom it connects to and measures, which instances come."""
