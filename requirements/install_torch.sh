#!/usr/bin/env bash
# Installs torch for an interpreter: requirements/install_torch.sh .venv/bin/python [cpu]. `make setup` calls it.
# A machine with an NVIDIA driver gets pip's default build unless `cpu` is given. Others get the CPU build of TORCH_INDEX, which is
# PyTorch's own by default. If that does not answer, pip's own sources decide; on the public index that is the CUDA build.
set -euo pipefail
python=$1
wanted=${CPU_TORCH:-torch==2.13.0}
index=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
sources=()
if [[ ${2:-} != cpu ]] && command -v nvidia-smi >/dev/null; then
  wanted="torch>=2.11,<2.15"
elif timeout 10 "$python" -c "import sys, urllib.request as r; r.urlopen(sys.argv[1], timeout=5)" "${index%/}/torch/" 2>/dev/null; then
  sources=(--extra-index-url "$index")
else
  echo "set-up: $index does not answer, so pip's own sources decide; the CUDA build takes 5.6 GB (TORCH_INDEX names another index)"
fi
"$python" -m pip install -q ${sources[@]+"${sources[@]}"} "$wanted"
# Reads torch/version.py: an import of torch takes seconds.
"$python" -c '
import importlib.util, runpy
found = runpy.run_path(importlib.util.find_spec("torch").submodule_search_locations[0] + "/version.py")
print("set-up: torch", found["__version__"], "(CUDA " + found["cuda"] + ")" if found["cuda"] else "(CPU)")'
