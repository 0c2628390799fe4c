"""What `pegainfer bench` is made of: a load client for any OpenAI endpoint, measurements, provenance and plots.

Needs the extra `bench` (numpy, psutil, matplotlib), so nothing outside of it imports this package but the command, when it runs.
"""
