"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request

from server.api.service import served_name, service_of
from server.api.wire import ModelBody, ModelList
from server.generation import ModelCard

router = APIRouter(prefix="/v1/models", tags=["models"])


def _describe(name: str, model: ModelCard) -> ModelBody:
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "sluice",
        "root": model.root,
        "max_model_len": model.max_model_len,
        "default_sampling": model.sampling_defaults,
    }


@router.get("")
async def list_models(request: Request) -> ModelList:
    """Every name the model is served under."""
    model, _ = service_of(request).ready_model()
    return {"object": "list", "data": [_describe(name, model) for name in model.served_names]}


@router.get("/{model_id:path}")
async def retrieve_model(request: Request, model_id: str) -> ModelBody:
    """One of them; a name may hold slashes."""
    model, _ = service_of(request).ready_model()
    return _describe(served_name(model_id, model), model)
