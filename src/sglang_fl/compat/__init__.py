"""Every place where SGLang is hooked, and every difference between its versions."""
