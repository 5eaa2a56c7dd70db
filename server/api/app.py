"""The ASGI application."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

import server
from server.api import errors
from server.api.exchange import ExchangeMiddleware
from server.api.ports import Engine
from server.api.routes import chat, completions, health, models
from server.api.service import KEEP_ALIVE_SECONDS, Service
from server.config import ServeSettings
from server.metrics import Metrics


def create_app(
    engine: Engine, metrics: Metrics, settings: ServeSettings, *, keep_alive: float = KEEP_ALIVE_SECONDS
) -> FastAPI:
    """All routes over one engine. `keep_alive`: seconds of silence after which a stream gets a comment."""
    app = FastAPI(
        title="Sluice",
        version=server.__version__,
        docs_url=None,  # both pages would load their scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.service = Service(engine, metrics, settings, keep_alive)
    app.add_middleware(ExchangeMiddleware, metrics=metrics)
    app.add_exception_handler(errors.APIError, errors.on_api_error)
    app.add_exception_handler(errors.ClientGone, errors.on_client_gone)
    app.add_exception_handler(HTTPException, errors.on_http_exception)
    app.add_exception_handler(RequestValidationError, errors.on_unfit_parameter)
    for routes in (health, models, completions, chat):
        app.include_router(routes.router)
    return app
