"""/debug/kv: off unless asked for, and what it shows is what there is."""

from __future__ import annotations

from server.api.blockmap import LETTERS, block_map
from server.generation import Phase
from server.reports import CacheSnapshot, GroupSnapshot, HostReport, SequenceSnapshot
from tests.api.conftest import Serve, Served
from tests.api.test_validation import check_error

SNAPSHOT = CacheSnapshot(
    capacity_blocks=70,
    block_size=16,
    used_blocks=9,
    cached_blocks=3,
    free_blocks=58,
    groups=(GroupSnapshot(None, None), GroupSnapshot(32, None)),
    sequences=(
        SequenceSnapshot("a/0/0", "running", 80, 79, 0, 2, (((1, 2), (5, 6)), ((8, 8),))),
        SequenceSnapshot("b/1/0", "running", 40, 40, 16, 2, (((1, 2), (4, 4)), ((65, 66),))),
        SequenceSnapshot("c/2/0", "ended", 16, 3, 0, 0, (((70, 70),), ())),
        SequenceSnapshot("d/3/0", "waiting", 9, 0, 0, 0, ((), ())),
    ),
    cached=((10, 11), (64, 64)),
    host=HostReport(capacity_blocks=8, used_blocks=3, saved_blocks=5, loaded_blocks=2, evicted_blocks=1),
)
MAP = f"""\
70 blocks of 16 tokens: 9 used, 3 cached, 58 free
block tables: everything, window of 32
host memory: 8 blocks, 3 used; 5 saved, 2 loaded, 1 given up

 1 ##.BAA.A.cc{"." * 52}c
65 BB...C

. free   c cached   # held by several   * held by one that has no letter

A running a/0/0  80 tokens, 79 computed, 0 evicted, 4+1 blocks, 2 shared
B running b/1/0  40 tokens, 40 computed, 16 evicted, 3+2 blocks, 2 shared
C ended   c/2/0  16 tokens, 3 computed, 0 evicted, 1+0 blocks, 0 shared
  waiting d/3/0  9 tokens, 0 computed, 0 evicted, 0+0 blocks, 0 shared
"""


async def test_it_is_off_unless_asked_for(served: Served) -> None:
    for query in ("", "?format=text"):
        error = check_error(await served.client.get(f"/debug/kv{query}"), 404)
        assert error["code"] == "debug_endpoints_off"
        assert "--debug-endpoints" in error["message"]


async def test_it_needs_a_key_as_all_else(serve: Serve) -> None:
    async with serve(api_key=["sesame"], public_metrics=True, debug_endpoints=True) as served:
        assert (await served.client.get("/debug/kv")).status_code == 401
        assert (await served.client.get("/debug/kv", headers={"x-api-key": "sesame"})).status_code == 200


async def test_json_has_all_of_it(serve: Serve) -> None:
    async with serve(debug_endpoints=True) as served:
        served.engine.snapshot = SNAPSHOT
        for query in ("", "?format=json"):
            response = await served.client.get(f"/debug/kv{query}")
            assert response.headers["content-type"] == "application/json"
            body = response.json()
            assert body.keys() == set(CacheSnapshot.__slots__)
            assert (body["capacity_blocks"], body["free_blocks"], body["cached"]) == (70, 58, [[10, 11], [64, 64]])
            assert body["groups"] == [{"window": None, "chunk": None}, {"window": 32, "chunk": None}]
            assert body["sequences"][1] == {
                "request_id": "b/1/0", "status": "running", "num_tokens": 40, "num_computed": 40, "num_evicted": 16,
                "num_shared": 2, "blocks": [[[1, 2], [4, 4]], [[65, 66]]],
            }  # fmt: skip
            assert body["host"]["loaded_blocks"] == 2


async def test_a_map_for_people(serve: Serve) -> None:
    async with serve(debug_endpoints=True) as served:
        served.engine.snapshot = SNAPSHOT
        response = await served.client.get("/debug/kv?format=text")
        assert response.headers["content-type"].startswith("text/plain")
        assert response.text == MAP
        error = check_error(await served.client.get("/debug/kv?format=html"))
        assert error["param"] == "format"


def test_a_map_has_letters_for_some_only() -> None:
    count = len(LETTERS) + 3
    sequences = tuple(SequenceSnapshot(f"s{i}", "running", 16, 16, 0, 0, (((i + 1, i + 1),),)) for i in range(count))
    page = block_map(CacheSnapshot(count, 16, count, 0, 0, (GroupSnapshot(None, None),), sequences, ()))
    assert len(set(LETTERS)) == len(LETTERS)
    assert not set(LETTERS) & set(".c#*")
    assert f"1 {LETTERS}***\n" in page
    assert page.count("\n* running") == 3


async def test_it_is_there_while_the_engine_is(serve: Serve) -> None:
    async with serve(debug_endpoints=True) as served:
        for phase, status in ((Phase.LOADING, 503), (Phase.READY, 200), (Phase.DRAINING, 200), (Phase.DEAD, 503)):
            served.engine.phase, served.engine.detail = phase, "out of luck"
            response = await served.client.get("/debug/kv")
            assert response.status_code == status
            if status == 503:
                error = check_error(response, 503)
                assert error["code"] == f"engine_{phase.value}"
                assert "out of luck" in error["message"]
