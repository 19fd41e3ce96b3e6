"""`python -m vllm.entrypoints.openai.api_server --model MODEL ...` runs the fake server."""

import runpy
from pathlib import Path

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).resolve().parents[4] / "fake_vllm.py"), run_name="__main__")
