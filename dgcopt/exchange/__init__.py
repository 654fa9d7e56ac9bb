"""The step, written once for all callers: prepare, vote, commit or abort; with exchanges in flight and agreement."""
