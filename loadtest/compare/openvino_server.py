"""OpenVINO GenAI's continuous batching behind /v1/completions: as much of a server as a comparison needs.

Run by the Python that has openvino_genai, so it imports nothing of ours and little beside. One thread steps the
pipeline; each connection has a thread that waits for its tokens. Requests are streamed, greedy, and their prompts are
text.
"""

from __future__ import annotations

import argparse
import itertools
import json
import queue
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import openvino_genai as ov

NAME = "openvino"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what an unfinished character decodes to


class Engine:
    """The pipeline and the thread that steps it while there are requests."""

    def __init__(self, options: argparse.Namespace) -> None:
        scheduler = ov.SchedulerConfig()
        scheduler.max_num_seqs = options.max_num_seqs
        scheduler.num_kv_blocks = options.kv_blocks
        scheduler.enable_prefix_caching = options.prefix_caching
        properties = {
            "INFERENCE_NUM_THREADS": options.threads,
            "INFERENCE_PRECISION_HINT": options.precision,
            "KV_CACHE_PRECISION": options.precision,
        }
        self._pipeline = ov.ContinuousBatchingPipeline(options.model, scheduler, options.device, properties)
        self.tokenizer = self._pipeline.get_tokenizer()
        self._arrived: queue.SimpleQueue[tuple[Any, Any, queue.SimpleQueue[Any]]] = queue.SimpleQueue()
        self._numbers = itertools.count()
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, prompt_ids: Any, max_tokens: int, ignore_eos: bool) -> queue.SimpleQueue[Any]:
        """A queue of lists of token ids, then "length" or "stop", or an exception."""
        config = ov.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.ignore_eos = ignore_eos
        config.do_sample = False
        config.eos_token_id = self.tokenizer.get_eos_token_id()
        tokens: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._arrived.put((prompt_ids, config, tokens))
        return tokens

    def _run(self) -> None:
        running: list[tuple[Any, queue.SimpleQueue[Any]]] = []
        while True:
            while not running or not self._arrived.empty():
                prompt_ids, config, tokens = self._arrived.get()
                try:
                    handle = self._pipeline.add_request(next(self._numbers), prompt_ids, config)
                except RuntimeError as error:
                    tokens.put(error)
                else:
                    running.append((handle, tokens))
            self._pipeline.step()
            running = [(handle, tokens) for handle, tokens in running if self._deliver(handle, tokens)]

    @staticmethod
    def _deliver(handle: Any, tokens: queue.SimpleQueue[Any]) -> bool:
        """Pass on what has come; whether more may."""
        reason = ov.GenerationFinishReason.NONE
        while handle.can_read():
            for output in handle.read().values():
                tokens.put(output.generated_ids)
                reason = output.finish_reason
        if handle.get_status() == ov.GenerationStatus.RUNNING:
            return True
        if handle.get_status() == ov.GenerationStatus.IGNORED:
            tokens.put(RuntimeError("the pipeline has no room for this request"))
        else:
            tokens.put("stop" if reason == ov.GenerationFinishReason.STOP else "length")
        return False


class Text:
    """Token ids to text, piece by piece; a few ids before the new ones decide on spaces between them."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context = self._shown = 0

    def add(self, ids: list[int]) -> str:
        """What the new ids add, empty while a character is unfinished."""
        self._ids += ids
        before = self._decode(self._ids[self._context : self._shown])
        now = self._decode(self._ids[self._context :])
        if len(now) <= len(before) or now.endswith(REPLACEMENT):
            return ""
        self._context, self._shown = self._shown, len(self._ids)
        return now[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids)) if ids else ""


class Handler(BaseHTTPRequestHandler):
    """One request a connection; the body of an answer ends with it."""

    engine: Engine

    def do_GET(self) -> None:
        if self.path == "/health":
            self._answer(200, {"status": "ok"})
        elif self.path == "/v1/models":
            self._answer(200, {"object": "list", "data": [{"id": NAME, "object": "model"}]})
        else:
            self._refuse(404, f"no {self.path}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body.get("prompt")
        if self.path != "/v1/completions":
            self._refuse(404, f"no {self.path}")
        elif not isinstance(prompt, str) or not body.get("stream") or body.get("temperature"):
            self._refuse(400, "prompts of text, streamed, at temperature 0 alone")
        else:
            self._stream(prompt, int(body["max_tokens"]), bool(body.get("ignore_eos")))

    def _stream(self, prompt: str, max_tokens: int, ignore_eos: bool) -> None:
        tokenizer = self.engine.tokenizer
        prompt_ids = tokenizer.encode(prompt).input_ids
        text, count = Text(tokenizer), 0
        tokens = self.engine.submit(prompt_ids, max_tokens, ignore_eos)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        while isinstance(got := tokens.get(), list):
            count += len(got)
            self._event(text.add(got), None, prompt_ids.shape[1], count)
        if isinstance(got, Exception):
            self._send(json.dumps({"error": {"message": str(got)}}))
            return
        self._event("", got, prompt_ids.shape[1], count)
        self._send("[DONE]")

    def _event(self, text: str, reason: str | None, prompt_tokens: int, completion_tokens: int) -> None:
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
        choice = {"index": 0, "text": text, "finish_reason": reason}
        self._send(json.dumps({"object": "text_completion", "model": NAME, "choices": [choice], "usage": usage}))

    def _send(self, data: str) -> None:
        self.wfile.write(f"data: {data}\n\n".encode())

    def _refuse(self, status: int, message: str) -> None:
        self._answer(status, {"error": {"message": message}})

    def _answer(self, status: int, payload: object) -> None:
        body = json.dumps(payload).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: a line a request would cost time that the pipeline could use."""


class Server(ThreadingHTTPServer):
    """Takes as many connections at once as a load test opens."""

    request_queue_size = 1024


def main() -> None:
    """Serve until told to end; the port opens once the model is loaded."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--max-num-seqs", type=int, required=True)
    parser.add_argument("--kv-blocks", type=int, required=True)
    parser.add_argument("--precision", required=True)
    parser.add_argument("--prefix-caching", action="store_true")
    parser.add_argument("--device", default="CPU")
    options = parser.parse_args()
    Handler.engine = Engine(options)
    Server((options.host, options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
