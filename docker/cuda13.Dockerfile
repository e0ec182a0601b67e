# A node of a GPU cluster. Build at the repository's root: docker build -f docker/cuda13.Dockerfile -t tlt-megatron:cuda13 .
# Not yet built on hardware. requirements/cuda13.txt says which versions agree, and why.
FROM nvidia/cuda:13.0.2-cudnn-devel-ubuntu24.04
RUN apt-get update && apt-get install -y --no-install-recommends \
      python3 python3-dev python3-venv build-essential git ninja-build && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
WORKDIR /opt/tlt_megatron
COPY requirements/cuda13.txt requirements/
RUN pip install --no-cache-dir -r requirements/cuda13.txt
RUN pip install --no-cache-dir --no-build-isolation "transformer-engine[core_cu13,pytorch]==2.11.0"
COPY . .
RUN pip install --no-cache-dir --no-deps -e . && python -m tlt_megatron.doctor
