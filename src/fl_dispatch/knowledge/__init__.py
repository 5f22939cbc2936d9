"""Knowledge about implementations: whether they can run here, how they failed, how often they ran."""
