# docker build -t g2po-trl .
# mkdir -p runs          # by the user with the id 1000, as in the image; else the run cannot write there
# docker run --rm -v "$PWD/runs:/home/agent/runs" g2po-trl train alfworld
#
# For GPUs: docker build --build-arg EXTRAS=alfworld,vllm -t g2po-trl:cuda .
#           docker run --rm --gpus all --shm-size 8g … g2po-trl:cuda train alfworld --config qwen2.5-1.5b-lora
# PyTorch's wheels contain CUDA. A smaller image without it: --build-arg TORCH_INDEX_URL=, the address of PyTorch's CPU
# wheels.
FROM python:3.11-slim

ARG EXTRAS=alfworld,webshop
ARG TORCH_INDEX_URL=

# Two dependencies of ALFWorld are compiled.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential \
    && rm -rf /var/lib/apt/lists/*
COPY . /opt/g2po-trl
RUN cd /opt/g2po-trl \
    && pip install --no-cache-dir ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} \
        --constraint constraints.txt ".[$EXTRAS]"

# Environments and agents run code of others.
RUN useradd --create-home --uid 1000 agent
USER agent
WORKDIR /home/agent
ENTRYPOINT ["g2po"]
CMD ["--help"]
