"""GET /model_info and /server_info: what SGLang's router asks each server behind it, under their old names, too."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from typing_extensions import TypedDict

import server
from server.api.service import service_of

router = APIRouter(tags=["operations"])


class ModelInfo(TypedDict):
    """Where the model and its tokenizer were loaded from. `is_generation`: it writes text, it does not embed."""

    model_path: str
    tokenizer_path: str
    is_generation: bool


class ServerInfo(TypedDict):
    """`max_running_requests`: sequences that are computed together, at most."""

    model_path: str
    served_model_name: str
    version: str
    max_running_requests: int


@router.get("/get_model_info", include_in_schema=False)
@router.get("/model_info")
async def model_info(request: Request) -> ModelInfo:
    """What kind of model this is."""
    model, _ = service_of(request).ready_model()
    return {"model_path": model.root, "tokenizer_path": model.root, "is_generation": True}


@router.get("/get_server_info", include_in_schema=False)
@router.get("/server_info")
async def server_info(request: Request) -> ServerInfo:
    """The name that the router lists the model under, and the server's limit."""
    service = service_of(request)
    model, _ = service.ready_model()
    return {
        "model_path": model.root,
        "served_model_name": model.served_names[0],
        "version": server.__version__,
        "max_running_requests": service.engine.status.max_num_seqs,
    }
