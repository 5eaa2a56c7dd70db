"""The ASGI application."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

import server
from server.api import errors
from server.api.auth import AuthMiddleware, load_keys
from server.api.cors import Cors
from server.api.exchange import ExchangeMiddleware
from server.api.ports import Engine
from server.api.routes import chat, completions, debug, health, info, messages, models, operate, responses, tokenize
from server.api.service import Service
from server.api.tracing import load_tracer
from server.config import ServeSettings
from server.metrics import Metrics


def create_app(engine: Engine, metrics: Metrics, settings: ServeSettings) -> FastAPI:
    """All routes over one engine. Raises UnusableOption."""
    keys = load_keys(settings)
    app = FastAPI(
        title="Sluice",
        version=server.__version__,
        docs_url=None,  # both pages would load their scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    tracer = load_tracer(settings)
    app.state.service = service = Service(engine, metrics, settings, tracer)
    if keys is not None:
        app.add_middleware(AuthMiddleware, keys=keys, public_metrics=settings.public_metrics)
    if settings.cors_origin:
        app.add_middleware(Cors, origins=settings.cors_origin)  # around the keys: a preflight cannot bring one
    app.add_middleware(ExchangeMiddleware, service=service, record=tracer.record if tracer else None)
    app.add_exception_handler(errors.APIError, errors.on_api_error)
    app.add_exception_handler(errors.ClientGone, errors.on_client_gone)
    app.add_exception_handler(HTTPException, errors.on_http_exception)
    app.add_exception_handler(RequestValidationError, errors.on_unfit_parameter)
    for routes in (health, models, info, completions, chat, responses, messages, tokenize, operate, debug):
        app.include_router(routes.router, responses=errors.RESPONSES)
    return app
