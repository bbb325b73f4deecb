"""A headless Chromium, driven through a pipe: no driver and no package between."""

import json
import os
import select
import shutil
import subprocess
import time

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)


class Browser:
    """One page of a headless Chromium."""

    def __init__(self, folder):
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        options = "--headless=new --no-sandbox --disable-gpu --no-first-run --remote-debugging-pipe"
        command = f'exec "$0" {options} "--user-data-dir=$1" 3<&{theirs_in} 4>&{theirs_out}'
        self.process = subprocess.Popen(
            ["bash", "-c", command, CHROMIUM, str(folder)],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self.reads, self.writes, self.buffer, self.count, self.session = ours_in, ours_out, b"", 0, None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.send("Emulation.setDeviceMetricsOverride", width=1200, height=1500, deviceScaleFactor=1, mobile=False)

    def send(self, method, **parameters):
        self.count += 1
        message = {"id": self.count, "method": method, "params": parameters}
        message |= {"sessionId": self.session} if self.session else {}
        os.write(self.writes, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self.count:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def _read(self, limit=60):
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.reads], [], [], limit)
            assert ready, "the browser does not answer"
            found = os.read(self.reads, 1 << 16)
            assert found, "the browser has ended"
            self.buffer += found
        line, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(line)

    def run(self, script):
        """The value of a JavaScript expression."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def text(self, selector):
        return self.run(f"document.querySelector({json.dumps(selector)}).textContent")

    def wait(self, condition, limit=60):
        """Until an expression is true."""
        end = time.monotonic() + limit
        while not self.run(condition):
            assert time.monotonic() < end, f"still not: {condition}; {self.run('document.body.innerText')[:500]}"
            time.sleep(0.05)

    def click(self, selector, share=0.5):
        """A click of the mouse inside an element, `share` of the way from its left."""
        box = self.run(
            f"(() => {{ const b = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
            " return [b.left, b.top, b.width, b.height]; })()"
        )
        place = {"x": box[0] + share * box[2], "y": box[1] + box[3] / 2, "button": "left", "clickCount": 1}
        self.send("Input.dispatchMouseEvent", type="mousePressed", **place)
        self.send("Input.dispatchMouseEvent", type="mouseReleased", **place)

    def type(self, text):
        self.send("Input.insertText", text=text)

    def press(self, key, code):
        for kind in ("rawKeyDown", "char", "keyUp"):
            extra = {"text": "\r"} if kind == "char" and key == "Enter" else {}
            if kind != "char" or extra:
                self.send("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **extra)

    def close(self):
        os.close(self.writes)
        os.close(self.reads)
        self.process.terminate()
        self.process.wait(20)
