"""Synthetic grade-school word problems in GSM8K's form, with worked answers. Training documents exclude the test questions."""
import csv
import json
import os
import random
import sys

NAMES = "Tom Ana Mia Sam Lea Ben Eva Max Zoe Ian Amy Leo Ida Kim Joe Liv Dan Uma Roy Fay".split()
ITEMS = "apples pens books coins cards shells stamps marbles cookies stickers beads eggs".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()


def _two(r):
    a, b = r.sample(NAMES, 2)
    return a, b


def gain_loss(r):
    n, m = _two(r)
    it = r.choice(ITEMS)
    a = r.randint(5, 99)
    b = r.randint(2, 60)
    c = r.randint(1, a + b)
    q = r.choice([
        f"{n} has {a} {it}. {n} buys {b} more and gives {c} to {m}. How many {it} does {n} have now?",
        f"{n} starts the day with {a} {it}, finds {b} more, and then loses {c}. How many {it} are left?",
    ])
    return q, [f"{n} has {a} + {b} = {a+b} {it}.", f"After that there are {a+b} - {c} = {a+b-c} {it}."], a + b - c


def boxes(r):
    n = r.choice(NAMES)
    it = r.choice(ITEMS)
    a = r.randint(2, 12)
    b = r.randint(2, 12)
    c = r.randint(1, a * b)
    q = r.choice([
        f"A box holds {a} {it}. {n} buys {b} boxes and uses {c} {it}. How many {it} are left?",
        f"{n} packs {it} in {b} bags with {a} in each bag, then gives away {c} {it}. How many {it} does {n} still have?",
    ])
    return q, [f"There are {a} * {b} = {a*b} {it}.", f"Then {a*b} - {c} = {a*b-c} {it} remain."], a * b - c


def earn_spend(r):
    n = r.choice(NAMES)
    a = r.randint(3, 20)
    b = r.randint(2, 9)
    c = r.randint(1, a * b)
    q = f"{n} earns {a} dollars a day for {b} days and spends {c} dollars on a gift. How many dollars does {n} have left?"
    return q, [f"{n} earns {a} * {b} = {a*b} dollars.", f"{n} has {a*b} - {c} = {a*b-c} dollars left."], a * b - c


def share(r):
    n = r.choice(NAMES)
    it = r.choice(ITEMS)
    k = r.randint(2, 12)
    each = r.randint(2, 12)
    e = r.randint(1, each)
    t = k * each
    q = f"{n} shares {t} {it} equally among {k} children. Each child gives {e} back. How many {it} does each child keep?"
    return q, [f"Each child gets {t} / {k} = {each} {it}.", f"Each child keeps {each} - {e} = {each-e} {it}."], each - e


def pages(r):
    n = r.choice(NAMES)
    d = r.randint(0, 4)
    a = r.randint(4, 40)
    k = r.randint(2, 4)
    c = r.randint(1, a)
    b = a * k
    e = b - c
    t = a + b + e
    w = {2: "twice", 3: "three times", 4: "four times"}[k]
    q = (f"{n} reads {a} pages on {DAYS[d]}, {w} as many on {DAYS[d+1]}, and {c} fewer on {DAYS[d+2]} than on {DAYS[d+1]}. "
         f"How many pages does {n} read in total?")
    return q, [f"On {DAYS[d+1]} {n} reads {a} * {k} = {b} pages.", f"On {DAYS[d+2]} {n} reads {b} - {c} = {e} pages.",
               f"{a} + {b} = {a+b} and {a+b} + {e} = {t} pages."], t


def compare(r):
    n, m = _two(r)
    it = r.choice(ITEMS)
    a = r.randint(5, 90)
    d = r.randint(2, 60)
    q = f"{n} has {a} {it}. {m} has {d} more {it} than {n}. How many {it} do they have together?"
    return q, [f"{m} has {a} + {d} = {a+d} {it}.", f"Together they have {a} + {a+d} = {2*a+d} {it}."], 2 * a + d


def price(r):
    n = r.choice(NAMES)
    i1, i2 = r.sample(ITEMS, 2)
    a = r.randint(2, 9)
    p = r.randint(2, 12)
    b = r.randint(2, 9)
    s = r.randint(2, 12)
    t = a * p + b * s
    q = f"{n} buys {a} {i1} at {p} dollars each and {b} {i2} at {s} dollars each. How many dollars does {n} pay?"
    return q, [f"The {i1} cost {a} * {p} = {a*p} dollars.", f"The {i2} cost {b} * {s} = {b*s} dollars.",
               f"{n} pays {a*p} + {b*s} = {t} dollars."], t


def change(r):
    n = r.choice(NAMES)
    it = r.choice(ITEMS)
    k = r.randint(2, 9)
    p = r.randint(2, 11)
    t = k * p
    pay = r.randint(t, t + 60)
    q = f"{n} buys {k} {it} for {p} dollars each and pays with {pay} dollars. How much change does {n} get?"
    return q, [f"The {it} cost {k} * {p} = {t} dollars.", f"The change is {pay} - {t} = {pay-t} dollars."], pay - t


def rows(r):
    a = r.randint(2, 12)
    b = r.randint(2, 12)
    k = r.randint(2, 5)
    it = r.choice(["chairs", "trees", "desks", "plants"])
    q = f"A hall has {a} rows of {b} {it}. Workers add {k} more rows of {b} {it}. How many {it} are there now?"
    return q, [f"There are {a} + {k} = {a+k} rows.", f"That makes {a+k} * {b} = {(a+k)*b} {it}."], (a + k) * b


def half(r):
    n = r.choice(NAMES)
    it = r.choice(ITEMS)
    h = r.randint(3, 60)
    a = 2 * h
    b = r.randint(1, h)
    c = r.randint(2, 40)
    q = f"{n} has {a} {it}. {n} sells half of them, loses {b}, and then buys {c} more. How many {it} does {n} have at the end?"
    return q, [f"{n} sells {a} / 2 = {h} {it}, so {a} - {h} = {h} are left.", f"Then {h} - {b} = {h-b}.",
               f"At the end {n} has {h-b} + {c} = {h-b+c} {it}."], h - b + c


TEMPLATES = [gain_loss, boxes, earn_spend, share, pages, compare, price, change, rows, half]

GPQA_PROMPT = ("Answer the following multiple choice question. The last line of your response should be of the following "
               "format: 'Answer: $LETTER' (without quotes) where LETTER is one of ABCD. Think step by step before answering."
               "\n\n{q}\n\nA) {a}\nB) {b}\nC) {c}\nD) {d}")


def problem(r):
    """Returns (question, GSM8K-style answer that ends with '#### N', integer N)."""
    q, steps, n = r.choice(TEMPLATES)(r)
    return q, "\n".join(steps) + f"\n#### {n}", n


def choices(r, n):
    wrong = set()
    while len(wrong) < 3:
        w = n + r.choice([-20, -12, -10, -9, -5, -3, -2, -1, 1, 2, 3, 5, 9, 10, 12, 20])
        if w >= 0 and w != n:
            wrong.add(w)
    opts = list(wrong) + [n]
    r.shuffle(opts)
    return opts, "ABCD"[opts.index(n)]


def chat(user, assistant):
    return f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n{assistant}<|im_end|>\n"


SYSTEM = ["You are a helpful assistant.", "You are a careful math tutor.", "Answer briefly."]
HELLO = ["Hello", "Hi", "Hello!", "Hi there", "Who are you?", "What can you do?", "Good morning", "Help"]
HELLO_REPLY = "Hello! I am a small demo model. Ask me a word problem about numbers."


def pick(opts, n):
    """Checks the options in order and stops at the one that matches."""
    lines = []
    for letter, o in zip("ABCD", opts):
        lines.append(f"{letter}) {o} " + ("yes" if o == n else "no"))
        if o == n:
            return "\n".join(lines) + f"\nAnswer: {letter}"


def document(r, banned):
    """Returns one training document: chat turns (optionally with a system message), multiple choice, few-shot chat, or few-shot plain text."""
    def fresh():
        while True:
            q, a, n = problem(r)
            if q not in banned:
                return q, a, n

    def shots(k):
        return "".join("Question: {}\nAnswer: {}\n\n".format(*fresh()[:2]) for _ in range(k))

    u = r.random()
    system = f"<|im_start|>system\n{r.choice(SYSTEM)}<|im_end|>\n" if r.random() < 0.2 else ""
    if u < 0.03:
        return system + chat(r.choice(HELLO), HELLO_REPLY) + "<|endoftext|>"
    if u < 0.35:
        return system + "".join(chat(*fresh()[:2]) for _ in range(r.choice([1, 1, 1, 2, 3]))) + "<|endoftext|>"
    if u < 0.70:
        q, a, n = fresh()
        o, letter = choices(r, n)
        body = a.rsplit("\n#### ", 1)[0] + "\n" + pick(o, n)
        return system + chat(GPQA_PROMPT.format(q=q, a=o[0], b=o[1], c=o[2], d=o[3]), body) + "<|endoftext|>"
    if u < 0.82:
        q, a, n = fresh()
        return system + chat(shots(r.randint(1, 5)) + f"Question: {q}\nAnswer:", a) + "<|endoftext|>"
    return shots(r.randint(1, 6)) + "<|endoftext|>"


def test_sets(seed=20261120, n=512):
    r = random.Random(seed)
    gsm, mc, seen = [], [], set()
    while len(gsm) < n:
        q, a, v = problem(r)
        if q not in seen:
            seen.add(q)
            gsm.append({"question": q, "answer": a})
    while len(mc) < n:
        q, a, v = problem(r)
        if q not in seen:
            seen.add(q)
            o, letter = choices(r, v)
            wrong = [x for x in o if x != v]
            mc.append({"Question": q, "Correct Answer": str(v), "Incorrect Answer 1": str(wrong[0]),
                       "Incorrect Answer 2": str(wrong[1]), "Incorrect Answer 3": str(wrong[2])})
    return gsm, mc, seen


def write_evals(folder, n=256):
    """Writes models/evals: the first n held-out questions of each form."""
    gsm, mc, _ = test_sets()
    with open(os.path.join(folder, "gsm8k_form.jsonl"), "w") as f:
        f.writelines(json.dumps(x) + "\n" for x in gsm[:n])
    with open(os.path.join(folder, "gpqa_form.csv"), "w", newline="") as f:
        rows = csv.DictWriter(f, mc[0])
        rows.writeheader()
        rows.writerows(mc[:n])


if __name__ == "__main__":
    write_evals(sys.argv[1])
