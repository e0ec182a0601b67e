# The CPU default. Build at the repository's root: docker build -f docker/cpu.Dockerfile -t tlt-megatron:cpu .
FROM python:3.11-slim
RUN apt-get update && apt-get install -y --no-install-recommends build-essential git && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/tlt_megatron
COPY . .
RUN make setup
CMD ["make", "quickstart"]
