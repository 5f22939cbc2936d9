"""The HTTP server in front of engines: a request goes to one that reads the prompt, then to one that writes."""
