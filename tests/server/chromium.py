"""Drives headless Chromium through its DevTools protocol over a pipe: simulates a user and reads the page."""
import base64
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time

KEYS = {  # name: (Windows virtual-key code, text)
    "Enter": (13, "\r"), "Tab": (9, ""), "Escape": (27, ""), "ArrowRight": (39, ""), "ArrowDown": (40, ""),
}


def find():
    return shutil.which("chromium") or shutil.which("google-chrome")


def high(fd):
    """Moves a descriptor above those that the shell redirects."""
    new = fcntl.fcntl(fd, fcntl.F_DUPFD, 10)
    os.close(fd)
    return new


class Chromium:
    """with Chromium() as page: page.open(url) ..."""

    def __enter__(self):
        theirs_in, self.to = os.pipe()
        self.back, theirs_out = os.pipe()
        theirs_in, theirs_out = high(theirs_in), high(theirs_out)
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
                 "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
                 "--remote-debugging-pipe", "--user-data-dir=" + self.profile.name, "about:blank"]
        self.process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", find(), *flags],
            pass_fds=(theirs_in, theirs_out), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL)
        os.close(theirs_in)
        os.close(theirs_out)
        self.changed = threading.Condition()
        self.answers, self.errors, self.gone = {}, [], False
        self.next_id = 0
        self.session = None
        self.thread = threading.Thread(target=self.listen, daemon=True)
        self.thread.start()
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Accessibility"):
            self.call(domain + ".enable")
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(timeout=30)
        os.close(self.to)
        self.thread.join(timeout=30)
        self.profile.cleanup()

    def listen(self):
        rest = b""
        with os.fdopen(self.back, "rb", buffering=0) as back:
            while data := back.read(1 << 16):
                *whole, rest = (rest + data).split(b"\0")
                for text in whole:
                    self.take(json.loads(text))
        with self.changed:
            self.gone = True
            self.changed.notify_all()

    def take(self, message):
        with self.changed:
            if "id" in message:
                self.answers[message["id"]] = message
                self.changed.notify_all()
            elif message["method"] == "Runtime.exceptionThrown":
                self.errors.append(str(message["params"]["exceptionDetails"]))
            elif message["method"] == "Runtime.consoleAPICalled" and message["params"]["type"] in ("error", "warning"):
                self.errors.append(str(message["params"]["args"]))
            elif message["method"] == "Log.entryAdded" and message["params"]["entry"]["level"] in ("error", "warning"):
                entry = message["params"]["entry"]
                self.errors.append(f"{entry['source']}: {entry['text']} {entry.get('url', '')}")

    def call(self, method, **params):
        with self.changed:
            self.next_id += 1
            number = self.next_id
        message = {"id": number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        with self.changed:
            if not self.changed.wait_for(lambda: self.gone or number in self.answers, timeout=120):
                raise TimeoutError(method)
            if number not in self.answers:
                raise RuntimeError(f"Chromium ended with {self.process.poll()} before it answered {method}")
            answer = self.answers.pop(number)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def run(self, expression):
        """Returns the value of a JavaScript expression; awaits a promise."""
        result = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def until(self, expression, seconds=60):
        """Waits until the JavaScript expression is truthy; returns its value."""
        end = time.monotonic() + seconds
        while not (value := self.run(expression)):
            if time.monotonic() > end:
                raise TimeoutError(f"not true within {seconds} s: {expression}; the page shows:\n"
                                   + self.run("document.body.innerText"))
            time.sleep(0.02)
        return value

    def open(self, url):
        self.call("Page.navigate", url=url)
        self.until(f"document.readyState === 'complete' && location.href.startsWith({json.dumps(url)})")

    def press(self, key, shift=False):
        code, text = KEYS[key]
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def type(self, text):
        self.call("Input.insertText", text=text)

    def size(self, width, height, scale=1, mobile=False):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale,
                  mobile=mobile)

    def scheme(self, name):
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def screenshot(self, path):
        data = self.call("Page.captureScreenshot", format="png")["data"]
        with open(path, "wb") as file:
            file.write(base64.b64decode(data))
