"""A hub on loopback with one repository, and a download from it by the hub's own client.

A script of its own: the client reads its endpoint from the environment once, while imported.
"""

import hashlib
import http.server
import json
import os
import sys
import threading

import pytest

COMMIT = "c0ffee" + "0" * 34
FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights" * 1000,
    "pytorch_model.bin": b"the same weights again",
    "onnx/model.onnx": b"and again",
    "tokenizer.json": b"[]",
}
ASKED = []


class Hub(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_GET(self):
        path = self.path.partition("?")[0]
        ASKED.append(path)
        files = [
            {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for name, data in FILES.items()
        ]
        if path.startswith("/api/models/org/name/tree"):
            self.reply(json.dumps(files).encode())
        elif path.startswith("/api/models/org/name"):
            info = {"id": "org/name", "sha": COMMIT, "private": False, "tags": []}
            info["siblings"] = [{"rfilename": name} for name in FILES]
            self.reply(json.dumps(info).encode())
        else:
            self.reply(FILES.get(path.rpartition(f"{COMMIT}/")[2]))

    def do_HEAD(self):
        self.do_GET()

    def reply(self, data):
        if data is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)


def main(folder):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ["HF_ENDPOINT"] = f"http://127.0.0.1:{server.server_address[1]}"
    os.environ["HF_HOME"] = os.path.join(folder, "home")
    from streamload.core.errors import DownloadError
    from streamload.downloading import download

    for target in (None, os.path.join(folder, "here")):
        report = download("hf:org/name", target)
        for name in ("config.json", "model.safetensors", "tokenizer.json"):
            with open(os.path.join(report.folder, name), "rb") as file:
                assert file.read() == FILES[name]
        assert not os.path.exists(os.path.join(report.folder, "pytorch_model.bin"))
    assert not any(path.endswith((".bin", ".onnx")) for path in ASKED)
    with pytest.raises(DownloadError, match=r"hf:org/absent.*404"):
        download("hf:org/absent")


if __name__ == "__main__":
    main(sys.argv[1])
