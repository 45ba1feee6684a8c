"""Log-probabilities of listed ids (token_ids_logprob) from a running server."""
import concurrent.futures
import json
import urllib.request

PROMPTS = [list(range(5, 65)), list(range(70, 250, 3)), [9], list(range(300, 320))]


def generate(url, prompt, listed, tokens):
    body = {"input_ids": prompt, "return_logprob": True, "logprob_start_len": 0, "token_ids_logprob": listed,
            "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}}
    with urllib.request.urlopen(urllib.request.Request(url + "/generate", json.dumps(body).encode())) as answer:
        return json.loads(answer.read())["meta_info"]


def check_rows(tokens, rows, listed):
    """Wherever the token itself is listed, both log-probabilities are equal. Returns the number of such places."""
    assert len(rows) == len(tokens), (len(rows), len(tokens))
    found = 0
    for (logprob, token, _), row in zip(tokens, rows):
        if logprob is None:
            assert row is None, row
            continue
        assert [entry[1:] for entry in row] == [[i, None] for i in listed], row
        for value, i, _ in row:
            assert value <= 1e-6, row
            if i == token:
                assert abs(value - logprob) <= 1e-6, (row, token, logprob)
                found += 1
    return found


def check_listed_ids(url, repeats=True):
    """Checks concurrent requests, whose ids are tokens of the prompt and of the output. repeats: equal requests generate
    equal tokens; otherwise, because results depend on the batch, at least half of them. Returns the log-probabilities."""
    def check(prompt):
        output = [i for _, i, _ in generate(url, prompt, [0], 4)["output_token_logprobs"]]
        listed = prompt[::7] + output + [output[0]]
        meta, alone = generate(url, prompt, listed, 4), generate(url, prompt, listed, 0)
        found = check_rows(meta["input_token_logprobs"], meta["input_token_ids_logprobs"], listed)
        assert found >= (len(prompt) - 1) // 7, found
        found = check_rows(meta["output_token_logprobs"], meta["output_token_ids_logprobs"], listed)
        assert found >= 5 if repeats else found == sum(listed.count(i) for _, i, _ in meta["output_token_logprobs"])
        assert alone["completion_tokens"] == 0 and alone["output_token_logprobs"] == [], alone
        assert [len(row) for row in alone["output_token_ids_logprobs"]] == [len(listed)], alone
        found_in_output.append(found)
        return meta["input_token_ids_logprobs"], meta["output_token_ids_logprobs"], alone["output_token_ids_logprobs"]
    found_in_output = []
    with concurrent.futures.ThreadPoolExecutor(2 * len(PROMPTS)) as pool:
        results = list(pool.map(check, 2 * PROMPTS))
    assert sum(found >= 5 for found in found_in_output) >= len(PROMPTS), found_in_output
    return results
