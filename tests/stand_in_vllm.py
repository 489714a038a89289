"""A stand-in for vLLM: `stand_in_vllm.py serve FOLDER --port P ...` speaks its protocol, with canned replies.

The variable STAND_IN tells it otherwise, as JSON: {"fail": TEXT} ends it with that line, {"slow": SECONDS} lets it
wait before it answers, {"die_after": REPLIES} ends it in play, {"take_port": FILE} has another program on its port at
the first start, {"texts_only": true} keeps token ids to itself, {"model": true} samples from the model in FOLDER,
{"note": FILE} appends what it was started with and asked, a line each. With canned replies it
has a child, as vLLM has.
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
    parser.add_argument("--trust-remote-code", action="store_true")
    for name in ("enforce-eager", "no-enable-chunked-prefill"):
        parser.add_argument(f"--{name}", action="store_true")
    return parser.parse_args(argv)


def say(line):
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def note(**what):
    if "note" in TOLD:
        with LOCK, open(TOLD["note"], "a") as file:
            file.write(json.dumps(what) + "\n")


class Canned:
    """Replies that depend on the request alone, of geometric length."""

    def ids(self, body):
        rng = random.Random(f"{body['prompt']}/{body.get('seed') if body['temperature'] else 0}")
        length = 1
        while length <= body.get("min_tokens", 0) or (length < body["max_tokens"] and rng.random() > 0.2):
            length += 1
        words = [rng.choice(LETTERS) for _ in range(length)]
        return words if length == body["max_tokens"] else [*words[:-1], body["stop_token_ids"][0]]

    def tokenize(self, text, special):
        return [3 + byte for byte in text.encode()]

    def text(self, ids):
        return "x" * len(ids)


class Model:
    """Replies drawn from the model, with its own tokenizer for prompts that are text."""

    def __init__(self, folder):
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.torch, self.lock = torch, threading.Lock()
        self.model, self.tokenizer = (
            AutoModelForCausalLM.from_pretrained(folder),
            AutoTokenizer.from_pretrained(folder),
        )

    def tokenize(self, text, special):
        return self.tokenizer(text, add_special_tokens=special)["input_ids"]

    def text(self, ids):
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def ids(self, body):
        prompt, limit = body["prompt"], body["max_tokens"]
        how = {"do_sample": body["temperature"] > 0, "max_new_tokens": limit}
        if how["do_sample"]:
            top_k = max(0, body.get("top_k", 0))
            how |= {"temperature": body["temperature"], "top_p": body["top_p"], "top_k": top_k}
        how["eos_token_id"] = body.get("stop_token_ids") or self.tokenizer.eos_token_id
        with self.lock, self.torch.no_grad():
            self.torch.manual_seed(body.get("seed", random.getrandbits(60)))
            ids = self.torch.tensor([prompt])
            how |= {"attention_mask": self.torch.ones_like(ids), "pad_token_id": 0}
            return self.model.generate(ids, **how)[0, len(prompt) :].tolist()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        known = self.path == "/v1/models"
        self.answer(200 if known else 404, {"data": [{"id": self.server.flags.served_model_name}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        replies = self.server.replies
        if self.path == "/tokenize":
            ids = replies.tokenize(body["prompt"], body["add_special_tokens"])
            return self.answer(200, {"count": len(ids), "tokens": ids})
        if self.path != "/v1/completions" or body["model"] != self.server.flags.served_model_name:
            return self.answer(404, {"error": {"message": f"no {self.path} for {body['model']}"}})
        if isinstance(body["prompt"], str):
            body["prompt"] = replies.tokenize(body["prompt"], True)
        prompt = body["prompt"]
        if len(prompt) + body["max_tokens"] > self.server.flags.max_model_len:
            return self.answer(400, {"error": {"message": "maximum context length", "code": 400}})
        with LOCK:
            self.server.answered += 1
            if self.server.answered == TOLD.get("die_after"):
                say("a fault of the engine\x1b[31m")
                os._exit(7)
        ids = replies.ids(body)
        ended = len(ids) < body["max_tokens"] or ids[-1] in body.get("stop_token_ids", [])
        choice = {"index": 0, "text": replies.text(ids), "finish_reason": "stop" if ended else "length"}
        if body.get("return_token_ids") and not TOLD.get("texts_only"):
            choice["token_ids"] = ids
        note(asked=body)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
        return self.answer(200, {"choices": [choice], "usage": usage})

    def answer(self, status, body):
        if self.headers.get("Authorization") != f"Bearer {os.environ['VLLM_API_KEY']}":
            status, body = 401, {"error": {"message": "wrong key"}}
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


class Server(ThreadingHTTPServer):
    request_queue_size = 512

    def handle_error(self, request, client_address):  # of clients that are gone
        pass


def main():
    flags = parse(sys.argv[1:])
    assert os.environ["VLLM_API_KEY"] not in " ".join(sys.argv)
    hidden = [name for name in os.environ if name in ("RANK", "PYTHONPATH") or name.startswith("TORCHELASTIC")]
    pids = [os.getpid()]
    if not TOLD.get("model"):
        pids.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid)
    note(started=sys.argv[1:], pids=pids, hidden=hidden, gpus=os.environ.get("CUDA_VISIBLE_DEVICES"))
    say("loading the model")
    if "fail" in TOLD:
        sys.exit(TOLD["fail"])
    if "take_port" in TOLD and not os.path.exists(TOLD["take_port"]):
        with open(TOLD["take_port"], "w"):
            sys.exit(f"OSError: [Errno 98] Address already in use: {flags.port}")
    time.sleep(TOLD.get("slow", 0))
    server = Server((flags.host, flags.port), Handler)
    server.flags, server.answered = flags, 0
    server.replies = Model(flags.folder) if TOLD.get("model") else Canned()
    server.serve_forever(poll_interval=0.05)


if __name__ == "__main__":
    main()
