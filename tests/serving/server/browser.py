"""python browser.py URL PNG: opens a page in Chromium (Qt's, without a screen), and prints its text once it is live.

Stdout: the text when workers are shown, then, a line of its own later, the text after the next poll. PNG: a picture.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from PySide6.QtCore import QEventLoop, QTimer, QUrl
from PySide6.QtWebEngineWidgets import QWebEngineView
from PySide6.QtWidgets import QApplication

DEADLINE = 30.0
LIVE = "document.querySelectorAll('tr[data-instance]').length > 0 && !document.querySelector('#state.bad')"


def wait(milliseconds: int) -> None:
    loop = QEventLoop()
    QTimer.singleShot(milliseconds, loop.quit)
    loop.exec()


def evaluate(view: QWebEngineView, script: str) -> Any:
    found: list[Any] = []
    view.page().runJavaScript(script, 0, found.append)
    await_true(lambda: bool(found), script)
    return found[0]


def await_true(condition: Callable[[], Any], what: str) -> None:
    until = time.monotonic() + DEADLINE
    while not condition():
        if time.monotonic() > until:
            sys.exit(f"not within {DEADLINE:.0f} s: {what}")
        wait(20)


def main(url: str, picture: str) -> None:
    application = QApplication([sys.argv[0]])
    view = QWebEngineView()
    view.resize(1000, 640)
    view.show()
    view.load(QUrl(url))
    await_true(lambda: evaluate(view, LIVE), "live workers on the page")
    first = evaluate(view, "document.body.innerText")
    print(first, flush=True)
    await_true(lambda: evaluate(view, "document.body.innerText") != first, "a page that changes")
    print("THEN", evaluate(view, "document.body.innerText"), sep="\n", flush=True)
    wait(200)
    if not view.grab().save(picture):
        sys.exit(f"no picture in {picture}")
    view.close()

    application.quit()


if __name__ == "__main__":
    main(*sys.argv[1:])
