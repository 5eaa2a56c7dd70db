"""Stands in for `server.bench.bare`: the static cache takes 1 s for 4 requests, the dynamic one 2 s."""

from __future__ import annotations

import json
import sys


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        match request["op"]:
            case "about":
                answer = {"threads": 2, "device": "cpu", "dtype": "float32", "attention": "sdpa"}
            case "prompts":
                answer = {"prompts": [[hash(text) % 1000] * request["tokens"] for text in request["texts"]]}
            case "run":
                if "--fail" in sys.argv:
                    sys.exit("out of memory")
                seconds = len(request["prompts"]) / (4 if request["cache"] == "static" else 2)
                answer = {"seconds": seconds, "prefill_seconds": seconds / 4}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
