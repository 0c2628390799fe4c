"""pegainfer's HTTP server and command line. Its process imports no torch; the engine runs in another one."""
