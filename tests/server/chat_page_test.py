"""The chat page in headless Chromium: it shows responses with formulas and tables, stops them, shows the expert
load, explains errors, and works by keyboard, on a phone and in dark mode. Usage: chat_page_test.py FP4MOE MODEL [FOLDER for screenshots]"""
import http.server
import json
import re
import sys
import threading
import time
import urllib.request

import chromium
from serve_process import Serve, metric

QUESTION = "Tom has 3 apples and buys 4 more. How many apples does Tom have?"

# Lists each visible text whose WCAG contrast with its background is below AA (4.5; 3 for large text).
CONTRAST = """(() => {
  const channel = (v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const parse = (c) => c.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const ground = (e) => {
    for (; e; e = e.parentElement) {
      const c = parse(getComputedStyle(e).backgroundColor);
      if (c.length === 3 || c[3] === 1) return c;
    }
    return [255, 255, 255];
  };
  const bad = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const e = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !e.checkVisibility() || e.closest('script, noscript, .unseen, option')) continue;
    const style = getComputedStyle(e), a = light(parse(style.color)), b = light(ground(e));
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const large = parseFloat(style.fontSize) >= 24;
    if (contrast < (large ? 3 : 4.5)) bad.push([walker.currentNode.data.trim().slice(0, 40), contrast]);
  }
  return bad;
})()"""

# Records each state of the last response's text that was on the screen.
WATCH = """window.states = []; new MutationObserver(() => {
  const said = [...document.querySelectorAll('#log .assistant .said')].at(-1)?.textContent ?? '';
  if (said && said !== states.at(-1)) states.push(said);
}).observe(document.getElementById('log'), {childList: true, subtree: true, characterData: true})"""

LAST = "[...document.querySelectorAll('#log > .assistant')].at(-1)"
DONE = "document.getElementById('stop').hidden && document.querySelector('#log .assistant .note')?.textContent"


def check(condition, what):
    if not condition:
        raise AssertionError(what)


def get(url):
    with urllib.request.urlopen(url, timeout=60) as response:
        return response.read().decode()


def set_field(page, name, value):
    page.run(f"(() => {{ const e = document.getElementById('{name}'); e.value = '{value}';"
             f" e.dispatchEvent(new Event('change')); }})()")


def focused(page):
    return page.run("document.activeElement.id || document.activeElement.textContent")


def ask_by_keyboard(page, url):
    page.until("document.getElementById('model').textContent.includes('demo-gptoss-mxfp4')")
    check(focused(page) == "question", f"the focus is on {focused(page)!r}, not on the question")
    set_field(page, "temperature", "0")
    first, second = QUESTION.split(". ")
    page.type(first + ".")
    page.press("Enter", shift=True)
    check(page.run("document.querySelectorAll('#log > .user').length") == 0, "Shift+Enter sent the question")
    page.type(second)
    page.press("Enter")
    note = page.until(DONE)
    check(re.search(r"^\d+ tokens · [\d.]+ tokens/s · first token after \d+ ms$", note), note)
    check(focused(page) == "question", "the question lost the focus")
    asked = page.run("document.querySelector('#log > .user .said').textContent")
    check(asked == f"{first}.\n{second}", asked)
    body = {"model": "default", "temperature": 0, "messages": [{"role": "user", "content": asked}]}
    request = urllib.request.Request(url + "/v1/chat/completions", json.dumps(body).encode())
    want = json.loads(urllib.request.urlopen(request, timeout=60).read())["choices"][0]["message"]["content"]
    said = page.run(LAST + ".querySelector(':scope > .said').innerText")
    plain = lambda text: re.sub(r"[#\s]+", " ", text).strip()
    check(plain(said) == plain(want), f"{said!r}, not {want!r}")
    check(page.run("document.getElementById('spoken').textContent"), "the response was not announced to screen readers")


def stop(page, url, how):
    """Stops a response at temperature 100, which streams random words. One token in 500 ends the response, so it
    can end on the server or the page before the stop takes effect; then the test tries again."""
    set_field(page, "temperature", "100")
    aborted = metric(url, "num_aborted_requests_total")
    for _ in range(50):
        before = page.run("document.querySelectorAll('#log > .assistant').length")
        page.run("document.getElementById('question').focus(); states = []")
        page.type("Go on and on.")
        page.press("Enter")
        page.until(f"document.querySelectorAll('#log > .assistant').length > {before} && "
                   "(states.length > 3 || document.getElementById('stop').hidden)")
        if how == "Escape":
            page.press("Escape")
        else:
            page.run("document.getElementById('stop').click()")
        page.until("document.getElementById('stop').hidden && !document.getElementById('send').hidden", 10)
        note = page.run(LAST + ".querySelector('.note').textContent")
        if not note.endswith("stopped"):
            continue
        check(note.startswith("about "), note)
        grown = [len(state) for state in page.run("states")]
        check(len(grown) > 3 and grown == sorted(grown), f"the answer does not grow: {grown}")
        end = time.monotonic() + 30
        while metric(url, "num_running_reqs") > 0:
            check(time.monotonic() < end, f"the server still generates after {how}")
        if metric(url, "num_aborted_requests_total") > aborted:
            break
    else:
        check(False, f"no answer was stopped by {how}")
    set_field(page, "temperature", "0")


def heat_map(page, url):
    page.until("document.querySelectorAll('#hottest tbody tr').length > 0")
    page.until("document.getElementById('balance').textContent.endsWith('×')")
    colours = page.run("""(() => {
      const map = document.getElementById('map'), d = map.getContext('2d').getImageData(0, 0, map.width, map.height).data;
      const seen = new Set();
      for (let i = 0; i < d.length; i += 4) seen.add(d[i] << 16 | d[i + 1] << 8 | d[i + 2]);
      return seen.size; })()""")
    check(colours > 8, f"the map has {colours} colours")
    load = json.loads(get(url + "/expert_load?window=all"))
    check([layer["layer"] for layer in load["layers"]] == [0, 1, 2, 3], load)
    sums = [sum(layer["experts"]) for layer in load["layers"]]
    check(sums[0] == sums[1] == sums[2] > sums[3] > 0 and sums[0] % load["top_k"] == 0, sums)
    page.run("document.getElementById('map').focus()")
    page.press("ArrowRight")
    page.press("ArrowRight")
    page.press("ArrowDown")
    cell = page.run("document.getElementById('cell').textContent")
    check(cell.startswith("Layer 1, expert 1: "), cell)


def keyboard(page):
    """Tab reaches every control in page order; each has a name and shows its focus."""
    page.run("document.activeElement.blur(); getSelection().removeAllRanges();"
             " document.querySelector('header').scrollIntoView()")
    page.run("document.querySelector('.skip').focus()")
    seen = []
    for _ in range(40):
        here = page.run("""(() => { const e = document.activeElement; if (e === document.body) return null;
          const s = getComputedStyle(e);
          return [e.id || e.className || e.textContent, s.outlineStyle, parseFloat(s.outlineWidth), e.matches(':focus-visible')]; })()""")
        if here is None or here[0] in [s[0] for s in seen if s[0] not in ("again", "copy", "")]:
            break
        seen.append(here)
        page.press("Tab")
    for name, style, width, visible in seen:
        check(visible and style != "none" and width >= 2, f"{name}: the focus is not visible")
    order = [name for name, *_ in seen]
    wanted = ["skip", "fresh", "log", "question", "send", "window", "map", "save-svg", "save-json", "system",
              "temperature", "top_p", "max_tokens", "key"]
    check([name for name in order if name in wanted] == wanted, order)
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    for node in nodes:
        properties = {p["name"]: p["value"].get("value") for p in node.get("properties", [])}
        if properties.get("focusable") and node["role"]["value"] not in ("RootWebArea",):
            check(node.get("name", {}).get("value"), f"a {node['role']['value']} has no name: {node}")


def phone(page, shots):
    page.size(360, 740, scale=2, mobile=True)
    for part in ("chat", "experts", "settings"):
        page.run(f"document.querySelector('nav button[data-part={part}]').click()")
        page.until("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")
        width = page.run("Math.max(document.documentElement.scrollWidth, document.body.scrollWidth,"
                         " ...[...document.querySelectorAll('main, aside, #log')].map((e) => e.scrollWidth))")
        check(width <= 360, f"{part} is {width} pixels wide; the phone has 360")
        small = page.run("""[...document.querySelectorAll('button, input, select, textarea')]
          .filter((e) => e.checkVisibility() && e.getBoundingClientRect().height < 24).map((e) => e.id)""")
        check(not small, f"{part}: controls are too small for a finger: {small}")
        if shots:
            page.screenshot(f"{shots}/phone-{part}.png")
    page.run("document.querySelector('nav button[data-part=chat]').click()")
    page.size(1280, 800)


def schemes(page, shots, name="desktop"):
    for scheme in ("light", "dark"):
        page.scheme(scheme)
        page.until("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")
        check(page.run(CONTRAST) == [], f"{scheme}: {page.run(CONTRAST)}")
        if shots:
            page.screenshot(f"{shots}/{name}-{scheme}.png")


def real_server(binary, model, shots):
    with Serve(binary, model) as server, chromium.Chromium() as page:
        page.size(1280, 800)
        page.scheme("light")
        page.open(server.url + "/")
        page.until("document.querySelectorAll('.examples button').length === 3")
        check("apples" in page.run("document.querySelector('.examples').textContent"), "the examples do not suit the demo model")
        if shots:
            schemes(page, shots, "empty")
            page.scheme("light")
        ask_by_keyboard(page, server.url)
        check(page.run("document.title") == "demo-gptoss-mxfp4 – fp4moe", page.run("document.title"))
        heat_map(page, server.url)
        page.run(WATCH)
        stop(page, server.url, "Escape")
        stop(page, server.url, "the button")
        page.run("document.getElementById('fresh').click()")
        page.type(QUESTION)
        page.press("Enter")
        page.until(DONE)
        schemes(page, shots)
        keyboard(page)
        phone(page, shots)
        said = page.run("document.getElementById('log').textContent")
        set_field(page, "system", "Be brief.")
        page.open(server.url + "/chat")
        page.until("document.querySelectorAll('#log > li').length === 2")
        check(page.run("document.getElementById('log').textContent") == said, "the conversation is not kept")
        check(page.run("document.getElementById('system').value") == "Be brief.", "settings are not kept")
        check(page.errors == [], page.errors)


def with_key(binary, model):
    with Serve(binary, model, "--api-key", "open-sesame") as server, chromium.Chromium() as page:
        page.open(server.url + "/")
        wording = page.until("document.getElementById('notice').innerText")
        check("needs an API key" in wording, wording)
        check(page.run("document.getElementById('model').textContent") == "no model yet", "the page shows a model without a key")
        set_field(page, "key", "open-sesame")
        page.until("document.getElementById('model').textContent.includes('demo')")
        check(page.run("document.getElementById('notice').textContent") == "", "the refusal is still shown")
        page.run("document.getElementById('question').focus()")
        page.type("Hello")
        page.press("Enter")
        page.until(DONE)
        check(all("401" in error for error in page.errors), page.errors)


FORMULAS = r"""Inline $x^2 - 5x_1 = \frac{1}{2}$ and \(\alpha \le \sqrt[3]{\beta}\), costs $5 and $6, US$7, \$8 or $5-$10.

$$
\begin{aligned}
a &= \left( \frac{n(n+1)}{2} \right)^2 \\
b &= \sum_{i=1}^{n} i' + \int_0^\infty e^{-t} \, dt
\end{aligned}
$$

\[ A = \begin{pmatrix} a & b \\ c & d \end{pmatrix} \in \mathbb{R}^{2 \times 2}, \quad f = \begin{cases} 1 & \text{if } x > 0 \\ 0 \end{cases} \]

1. Known: $\mathbf{v} \cdot \mathcal{L}, \lim_{x \to 0} \frac{\sin x}{x}, \hat{y}, \binom{n}{k}, \overline{AB}$
   $$ y = 2 $$
2. Not known: $\foo{x} + \constructor{1}$

| left | centre | right |
|:-----|:------:|------:|
| $a$ | b \| c | 1 |
"""

# Formulas that are not understood stay text; none of it is markup.
MALFORMED = [r"$\frac{1}{$", r"$$ } x { $$", r"$\left( x$", r"$\begin{foo} x \end{foo}$", r"$\sqrt$", r"$x^$", r"$\begin{matrix} a & b$",
             "$$" + "{" * 1500 + "$$", "$$" + r"\sqrt" * 700 + "$$", "$$" + "x" * 5000 + "$$", r"\[ \right) \]", "$$ never closed", "$$$$", r"\(\)"]
HOSTILE_FORMULAS = r"""$<script>document.title='taken'</script>$ $\text{<img src=x onerror="document.title='taken'">}$
$$\href{javascript:document.title='taken'}{x} \class{a}{b} \style{color:red}{c} \unicode{x41}$$"""

HOSTILE = """# A heading
<img src=x onerror="document.title='taken'"> <script>document.title = 'taken'</script>
[here](javascript:document.title='taken') and [there](https://example.org/a?b=1) **bold *both*** `code <b>`

- one
- two
  1. deeper

| a | b |
|---|---|
| 1 | <b>2</b> |

```html
<script>document.title = 'taken'</script>
```"""


class Scripted(http.server.BaseHTTPRequestHandler):
    """Serves a real server's page and scripted responses, selected by the last message."""
    protocol_version = "HTTP/1.1"
    page = headers_of_page = None

    def log_message(self, *_):
        pass

    def answer(self, status, body, content_type="application/json", headers=()):
        self.send_response(status)
        for name, value in (("Content-Type", content_type), ("Content-Length", str(len(body))), *headers):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        if self.path == "/":
            policy = self.headers_of_page["Content-Security-Policy"]
            return self.answer(200, self.page, "text/html; charset=utf-8", [("Content-Security-Policy", policy)])
        if self.path == "/v1/models":
            return self.answer(200, json.dumps({"data": [{"id": "<b>scripted</b>"}]}).encode())
        if self.path == "/server_info":
            return self.answer(200, b'{"quantization":"x","backend":"y","num_layers":1,"num_experts":2,"top_k":1}')
        error = {"error": {"message": "experts' tokens are not counted on <b>this</b> device"}}
        return self.answer(400, json.dumps(error).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        what = body["messages"][-1]["content"]
        if what.startswith("refuse "):
            status, code = what.split()[1:3]
            error = {"error": {"message": "the queue of 4 requests is <b>full</b>", "code": None if code == "-" else code}}
            return self.answer(int(status), json.dumps(error).encode())
        if what == "hang up":
            self.close_connection = True
            return self.connection.close()
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        deltas = {"think": [{"reasoning_content": "Let me "}, {"reasoning_content": "see."}, {"content": "Seen."}],
                  "fail": [{"content": "Half "}], "cut": [{"content": "Only this"}]}.get(what, self.pieces(what))
        self.wfile.write(b": keep-alive\n\n")
        for delta in deltas:
            self.event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
        if what == "fail":
            self.event({"error": {"message": "rank 1 did not come", "type": "server_error"}})
        elif what != "cut":
            self.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
            self.event({"choices": [], "usage": {"completion_tokens": 4321}})
            self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def pieces(self, what):
        text = {"formulas": FORMULAS, "hostile formulas": HOSTILE_FORMULAS}.get(what, what if what.startswith("say ") else HOSTILE)
        return [{"content": text[i:i + 7]} for i in range(0, len(text), 7)]

    def event(self, value):
        self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")


def say(page, text):
    before = page.run("document.querySelectorAll('#log > .assistant').length")
    page.run("document.getElementById('question').focus()")
    page.type(text)
    page.press("Enter")
    page.until(f"document.querySelectorAll('#log > .assistant').length > {before} && "
               "document.getElementById('stop').hidden")
    return page.run(LAST + ".innerText")


def shown(page, text):
    """Renders a response and returns its markup and its text."""
    return page.run(f"""(() => {{ const e = document.createElement('div'); e.append(...markdown({json.dumps(text)}));
      return [e.innerHTML, e.textContent]; }})()""")


def formulas(page, shots):
    say(page, "formulas")
    said = LAST + ".querySelector(':scope > .said')"
    namespaces = page.run(f"[...{said}.querySelectorAll('math, math *')].map((e) => e.namespaceURI)")
    check(set(namespaces) == {"http://www.w3.org/1998/Math/MathML"}, set(namespaces))
    tags = set(page.run(f"[...{said}.querySelectorAll('math *')].map((e) => e.tagName)"))
    want = set("mfrac mroot msub msup msubsup munderover mover mtable mtr mtd mtext mspace mi mn mo mrow".split())
    check(want <= tags, want - tags)
    check(page.run(f"{said}.querySelectorAll('math').length") == 8, "a formula is missing")
    check(page.run(f"{said}.querySelectorAll('math[display=block]').length") == 3, "a displayed formula is missing")
    text = page.run(said + ".textContent")
    for part in ("costs $5 and $6, US$7, $8 or $5-$10.", "α≤", "∑", "∫", "ℝ", "𝐯", "ℒ", "\\foo", "\\constructor"):
        check(part in text, f"{part} is not in {text}")
    check(page.run(said + ".querySelector('math').getAttribute('alttext')") == r"x^2 - 5x_1 = \frac{1}{2}", "alttext")
    check(page.run(f"{said}.querySelector('ol li math[display=block]') !== null"), "the formula in the list is not displayed")
    sides = page.run(f"[...{said}.querySelectorAll('td')].map((e) => getComputedStyle(e).textAlign)")
    check(sides == ["left", "center", "right"], sides)
    check(page.run(f"{said}.querySelectorAll('td')[1].textContent") == "b | c", "an escaped | splits a cell")
    if shots:
        for scheme in ("light", "dark"):
            page.scheme(scheme)
            page.screenshot(f"{shots}/formulas-{scheme}.png")


def malformed(page):
    for text in MALFORMED:
        markup, plain = shown(page, text)
        check("<math" not in markup and plain == text, f"{text[:60]!r} became {markup[:200]!r}")
    for text in ("costs $5 and $6", "$5, $6 and $7", "US$5 or US$6", "$8 (US$)", "from $5-$10", "$5/month (or 50$)", "a $ b $ c", "`$x$`"):
        markup, plain = shown(page, text)
        check("<math" not in markup and plain == text.strip("`"), f"{text!r} became {markup!r}")
    for text in ("$5$", "$x$", "$2x+1$", "$10\\%$", "($x$)", "$x$, $y$"):
        check("<math" in shown(page, text)[0], f"{text!r} is not a formula")
    for text in ("{" * 100_000, "$" + "{" * 100_000 + "$", "$$\n" + "{" * 100_000 + "\n$$", ">" * 100_000, "$" * 100_000, "\\[" * 50_000,
                 "\n".join(" " * i + "- x" for i in range(400)), "| a " * 20_000 + "\n" + "|-" * 20_000, "*_" * 50_000, "$$\nx\n" * 5_000):
        begin = time.monotonic()
        shown(page, text)
        check(time.monotonic() - begin < 5, f"{text[:20]!r}... takes {time.monotonic() - begin:.1f} s")
    say(page, "hostile formulas")
    tags = set(page.run(LAST + ".querySelector(':scope > .said').innerHTML.match(/<[a-z0-9]+/g)"))
    check(tags <= {"<" + t for t in "p br span code math mrow mo mi mn mtext mspace msup".split()}, tags)
    check(page.run("document.title").endswith("fp4moe"), page.run("document.title"))
    check(page.run("document.querySelectorAll('#log script, #log img, #log [href^=javascript]').length") == 0, "markup of the model")


def streaming(page):
    """Blocks that are complete are not rendered again, and the result is that of the whole text."""
    same = page.run(f"""(() => {{
      const text = {json.dumps((FORMULAS + HOSTILE + chr(10) * 2) * 3)}, target = document.createElement('div'), whole = document.createElement('div');
      const growing = new GrowingText(target);
      for (let i = 1; i <= text.length; i++) growing.show(text.slice(0, i));
      whole.append(...markdown(text));
      return target.innerHTML === whole.innerHTML; }})()""")
    check(same, "a text that grows is shown differently from the whole text")
    kept, milliseconds = page.run("""(() => {
      const part = 'A paragraph with $x^2$ and **bold**.\\n\\n'.replaceAll('\\\\n', '\\n'), target = document.createElement('div');
      const growing = new GrowingText(target);
      let text = part.repeat(2000);
      growing.show(text);
      const first = target.children[1000], begin = performance.now();
      for (let i = 0; i < 1000; i++) growing.show(text += 'word ');
      return [first === target.children[1000], performance.now() - begin]; })()""")
    check(kept, "complete blocks are rendered again")
    check(milliseconds < 3000, f"1000 pieces at the end of a long response take {milliseconds} ms")


def copies(page):
    page.run("(() => { window.copied = []; Object.defineProperty(navigator, 'clipboard', {configurable: true,"
             " value: {writeText: async (text) => void copied.push(text)}}); })()")
    say(page, "attack")
    page.run(LAST + ".querySelector('.code .copy').click()")
    page.run(LAST + ".querySelector(':scope > .after .copy').click()")
    page.run("[...document.querySelectorAll('#log > .user .copy')].at(-1).click()")
    check(page.run("copied") == ["<script>document.title = 'taken'</script>", HOSTILE, "attack"], page.run("copied"))
    page.until(LAST + ".querySelector('.code .copy').textContent === 'Copied'")
    check(page.run(LAST + ".querySelector('.code .bar').textContent").startswith("html"), "the language is not shown")


def errors(page, scripted):
    for status, code, words in ((400, "context_length_exceeded", "too long for the model"), (400, "-", "does not accept the request"),
                                (401, "-", "needs an API key"), (404, "-", "Reload"), (413, "-", "too large"),
                                (429, "-", "too many requests"), (500, "-", "could not complete"),
                                (503, "unavailable", "too many requests"), (504, "timeout", "longer than the server allows")):
        text = say(page, f"refuse {status} {code}")
        check(words in text and "<b>full</b>" not in text, f"{status}: {text}")
        check(page.run(LAST + ".querySelector('.says p').textContent") == "the queue of 4 requests is <b>full</b>", "the server's message")
        away = page.run("(() => { const log = document.getElementById('log'); return log.scrollHeight - log.scrollTop - log.clientHeight; })()")
        check(away < 8, f"the page does not follow the response: {away} pixels away from its end")
        check(page.run(LAST + ".querySelector('.says').open") is False, "the server's message is not collapsed")
    check("unreachable" in say(page, "hang up"), "a network error is not explained")
    check("still loading" in page.run("explain({status: 503, code: 'unavailable', message: 'the model is still loading'})"), "loading")
    set_field(page, "key", "wrong")
    check("does not accept the API key" in say(page, "refuse 401 -"), "a wrong key is not explained")
    set_field(page, "key", "")


def examples(page, scripted):
    """An empty page has three questions; a click sends one."""
    page.run("document.getElementById('fresh').click()")
    questions = page.run("[...document.querySelectorAll('.examples button')].map((e) => e.textContent)")
    check(len(questions) == 3, questions)
    page.run("document.querySelectorAll('.examples button')[1].click()")
    page.until("document.querySelector('#log > .assistant') !== null && document.getElementById('stop').hidden")
    check(scripted.asked[-1]["messages"][-1]["content"] == questions[1], scripted.asked[-1])
    check(page.run("document.querySelector('.examples')") is None, "the examples are still shown")
    page.run("document.getElementById('fresh').click()")


def scripted(binary, model, shots):
    with Serve(binary, model) as server:
        with urllib.request.urlopen(server.url + "/", timeout=60) as response:
            Scripted.page, Scripted.headers_of_page = response.read(), response.headers
    scripted = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Scripted)
    scripted.asked = []
    threading.Thread(target=scripted.serve_forever, daemon=True).start()
    with chromium.Chromium() as page:
        page.size(1280, 800)
        page.open(f"http://127.0.0.1:{scripted.server_port}/")
        page.until("document.getElementById('model').textContent.startsWith('<b>scripted</b> · x')")
        page.until("document.getElementById('load-error').textContent.includes('counted on <b>this</b> device')")
        set_field(page, "system", "Be kind.")
        set_field(page, "top_p", "0.5")
        set_field(page, "max_tokens", "9")
        check("too many requests" in say(page, "refuse 429 -"), "the refusal is not shown")
        text = say(page, "fail")
        check("Half" in text and "could not complete" in text and "rank 1 did not come" not in text, text)
        check("rank 1 did not come" in page.run(LAST + ".textContent"), "the server's message is missing")
        check("ended before the response" in say(page, "cut"), "a truncated response looks complete")

        say(page, "think")
        check(page.run(LAST + ".querySelector('details').open") is False, "the reasoning is not collapsed")
        check(page.run(LAST + ".querySelector('details .said').textContent") == "Let me see.", "the reasoning is wrong")
        check(page.run(LAST + ".querySelector('summary').textContent") == "Reasoning", "the summary is wrong")
        said = [m["content"] for m in scripted.asked[-1]["messages"]]
        check(said == ["Be kind.", "refuse 429 -", "fail", "cut", "think"], said)  # no failed responses
        asked = {k: v for k, v in scripted.asked[-1].items() if k not in ("messages", "model")}
        check(asked == {"stream": True, "stream_options": {"include_usage": True}, "top_p": 0.5, "max_tokens": 9}, asked)

        say(page, "attack")
        check("4321 tokens" in page.run(LAST + ".querySelector('.note').textContent"), "usage is not shown")
        check("token limit" in page.run(LAST + ".querySelector('.note').textContent"), "the limit is not shown")
        check(page.run("document.title") == "<b>scripted</b> – fp4moe", page.run("document.title"))
        tags = page.run("[...document.querySelectorAll('#log .said')].at(-1).innerHTML.match(/<[a-z0-9]+/g)")
        check(set(tags) <= {"<" + t for t in "p br h3 a strong em code ul ol li div table thead tbody tr th td pre span button".split()},
              tags)
        check({"<h3", "<table", "<pre", "<ul", "<ol", "<strong", "<em", "<code"} <= set(tags), tags)
        links = page.run("[...document.querySelectorAll('#log .said a')].map((a) => [a.href, a.rel])")
        check(links == [["https://example.org/a?b=1", "noopener noreferrer"]], links)
        copies(page)
        formulas(page, shots)
        malformed(page)
        streaming(page)
        examples(page, scripted)
        errors(page, scripted)
        if shots:
            schemes(page, shots, "errors")
        inline = page.run("new Promise((done) => { const s = document.createElement('script');"
                          " s.textContent = 'window.taken = 1'; document.body.append(s);"
                          " setTimeout(() => done(window.taken ?? 0)); })")
        check(inline == 0, "the content security policy lets other scripts run")
    scripted.shutdown()
    scripted.server_close()


def main():
    binary, model, *shots = sys.argv[1:]
    if chromium.find() is None:
        print("SKIPPED: no Chromium on this machine: the chat page is not tested (apt-get install chromium)")
        sys.exit(77)
    real_server(binary, model, shots[0] if shots else None)
    with_key(binary, model)
    scripted(binary, model, shots[0] if shots else None)
    print("the chat page shows responses, stops them, and shows the expert load")


if __name__ == "__main__":
    main()
