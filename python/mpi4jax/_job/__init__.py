"""This process in its job: the watchdog, ranks that fail, waiting for what was started."""
