"""A route of another plugin's in the host's server."""

from typing import Any

from fastapi import FastAPI


class Greeting:
    name = "greeting"
    required_tasks = None

    def attach_router(self, app: FastAPI) -> None:
        @app.get("/greeting")
        def greet() -> dict[str, str]:
            return {"says": self.says}

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        self.says = f"{args.served_model_name[0]} is served"
