"""SGLang's platform: its class, its start, and the server arguments that it changes or refuses."""
