// The target fp4moe_test_headers needs a source; its precompiled header is what tests use.
