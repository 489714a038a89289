"""A stand-in for vLLM: `stand_in_vllm.py serve FOLDER --port P ...` speaks its protocol, with canned replies.

The environment variable STAND_IN changes its behaviour. It holds JSON:
{"fail": TEXT} ends it at its start with that line; {"slow": SECONDS} lets it wait before it answers;
{"pace": SECONDS}: each reply takes that long; {"die_after": REPLIES} ends it in play;
{"model": true} gives the greedy replies of the model in FOLDER;
{"note": FILE} appends how it was started and what it was asked, one line each.
With canned replies it has a child process, as vLLM has.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOLD = json.loads(os.environ.get("STAND_IN", "{}"))
LOCK = threading.Lock()
LETTERS = range(69, 95)  # ids of the tests' byte tokenizer


def parse(argv):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("serve", choices=["serve"])
    parser.add_argument("folder")
    for name in ("served-model-name", "host", "generation-config", "dtype", "uvicorn-log-level"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("port", "max-model-len"):
        parser.add_argument(f"--{name}", required=True, type=int)
    for name in ("max-num-seqs", "max-num-batched-tokens", "gpu-memory-utilization", "tensor-parallel-size"):
        parser.add_argument(f"--{name}", type=float)
    for name in ("trust-remote-code", "enforce-eager", "no-enable-chunked-prefill"):
        parser.add_argument(f"--{name}", action="store_true")
    return parser.parse_args(argv)


def say(line):
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def note(**what):
    if "note" in TOLD:
        with LOCK, open(TOLD["note"], "a") as file:
            file.write(json.dumps(what) + "\n")


def canned_reply(body):
    """The ids of a reply that depends on the request alone, of geometric length."""
    rng = random.Random(f"{body['prompt']}/{body.get('seed') if body['temperature'] else 0}")
    length = 1
    while length <= body.get("min_tokens", 0) or (length < body["max_tokens"] and rng.random() > 0.2):
        length += 1
    ids = [rng.choice(LETTERS) for _ in range(length)]
    return ids if length == body["max_tokens"] else [*ids[:-1], body["stop_token_ids"][0]]


def model_replies(folder):
    """A function that gives the ids of the model's greedy replies."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)

    def reply(body):
        ids = torch.tensor([body["prompt"]])
        how = {"max_new_tokens": body["max_tokens"], "eos_token_id": body["stop_token_ids"], "do_sample": False}
        with LOCK, torch.no_grad():
            return model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **how)[0, ids.shape[1] :]

    return lambda body: reply(body).tolist()


class JSONHandler(BaseHTTPRequestHandler):
    """Reads and sends JSON."""

    protocol_version = "HTTP/1.1"

    def body(self):
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def answer(self, status, headers, body):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **headers, "Content-Length": len(data)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


class JSONServer(ThreadingHTTPServer):
    request_queue_size = 512

    def handle_error(self, request, client_address):  # of clients that are gone
        pass


class Handler(JSONHandler):
    """Answers requests that have the key."""

    def do_GET(self):
        known = self.path == "/v1/models"
        self.answer(200 if known else 404, {}, {"data": [{"id": self.server.flags.served_model_name}]})

    def do_POST(self):
        body = self.body()
        if self.path != "/v1/completions" or body["model"] != self.server.flags.served_model_name:
            return self.answer(404, {}, {"error": {"message": f"no {self.path} for {body['model']}"}})
        prompt = body["prompt"]
        if len(prompt) + body["max_tokens"] > self.server.flags.max_model_len:
            return self.answer(400, {}, {"error": {"message": "maximum context length", "code": 400}})
        with LOCK:
            self.server.answered += 1
            if self.server.answered == TOLD.get("die_after"):
                say("a fault of the engine\x1b[31m")
                os._exit(7)
        time.sleep(TOLD.get("pace", 0))
        ids = self.server.reply(body)
        ended = len(ids) < body["max_tokens"] or ids[-1] in body["stop_token_ids"]
        choice = {"index": 0, "text": "x" * len(ids), "finish_reason": "stop" if ended else "length"}
        if body.get("return_token_ids"):
            choice["token_ids"] = ids
        note(asked=body)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
        return self.answer(200, {}, {"choices": [choice], "usage": usage})

    def answer(self, status, headers, body):
        if self.headers.get("Authorization") != f"Bearer {os.environ['VLLM_API_KEY']}":
            status, body = 401, {"error": {"message": "wrong key"}}
        super().answer(status, headers, body)


def main():
    flags = parse(sys.argv[1:])
    assert os.environ["VLLM_API_KEY"] not in " ".join(sys.argv)
    pids = [os.getpid()]
    if not TOLD.get("model"):
        pids.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid)
    note(started=sys.argv[1:], pids=pids, environment=dict(os.environ))
    say("loading the model")
    if "fail" in TOLD:
        sys.exit(TOLD["fail"])
    time.sleep(TOLD.get("slow", 0))
    server = JSONServer((flags.host, flags.port), Handler)
    server.flags, server.answered = flags, 0
    server.reply = model_replies(flags.folder) if TOLD.get("model") else canned_reply
    server.serve_forever(poll_interval=0.05)


if __name__ == "__main__":
    main()
