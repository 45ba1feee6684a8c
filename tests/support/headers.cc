// The target fp4moe_test_headers needs a source file; tests use only its precompiled header.
