#!/usr/bin/env bash
usage() {
    cat <<'TEXT'
usage: deploy/check_container.sh [options]

Builds deploy/Dockerfile and runs the image, without a Docker engine: buildah builds on a Debian made by debootstrap
(or on --base-image), podman runs it with a read-only root, without capabilities and as its own user. The container
must become ready and healthy, answer a completion, and on SIGTERM finish the stream it is in and exit with 0. Prints
the size of each layer and what an update of the server changes. For root on Debian or Ubuntu, with
    apt-get install buildah podman runc debootstrap iptables curl jq

  --base-image IMAGE    build on this image, which is pulled, instead of a new Debian
  --suite NAME          the Debian to make (default: bookworm)
  --mirror URL          where debootstrap takes it from (default: debootstrap's own)
  --cache DIR           where the Debian that was made is kept for the next run (default: ~/.cache/sluice-container)
  --pip-conf FILE       pip's configuration during the build: indexes, certificates
  --build-option OPTION one more option of `buildah build`, as it stands; may be repeated
  --device cpu|cuda     which variant (default: cpu); cuda runs on the processor where nvidia-smi finds no GPU
  --keep DIR            write images, layers and logs here and leave them for the next run, which then builds only what
                        has changed (default: a directory below /var/tmp that is removed at the end)
TEXT
}

set -euo pipefail

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
ANSWER_TOKENS=150 # enough that the stream is still running when the signal arrives
CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/sluice-container
SUITE=bookworm
MIRROR=
DEVICE=cpu
BASE_IMAGE=
KEEP=
BUILD_OPTIONS=()

while [ $# -gt 0 ]; do
    case $1 in
    -h | --help)
        usage
        exit 0
        ;;
    esac
    [ $# -gt 1 ] || { usage >&2 && exit 2; }
    case $1 in
    --base-image) BASE_IMAGE=$2 ;;
    --suite) SUITE=$2 ;;
    --mirror) MIRROR=$2 ;;
    --cache) CACHE=$2 ;;
    --pip-conf) BUILD_OPTIONS+=(--secret "id=pip,src=$(realpath -- "$2")") ;;
    --build-option) BUILD_OPTIONS+=("$2") ;;
    --device) DEVICE=$2 ;;
    --keep) KEEP=$2 ;;
    *)
        usage >&2
        exit 2
        ;;
    esac
    shift 2
done

say() { printf '%(%H:%M:%S)T  %s\n' -1 "$*"; }
die() {
    say "FAILED: $*"
    exit 1
}

[ "$(id -u)" = 0 ] || die "needs root: debootstrap and buildah's chroot isolation do"
for program in buildah podman runc curl jq debootstrap; do
    command -v "$program" >/dev/null || die "$program is missing; see --help"
done

if [ -n "$KEEP" ]; then mkdir -p "$KEEP" && WORK=$(realpath -- "$KEEP"); else WORK=$(mktemp -d /var/tmp/sluice-container.XXXXXX); fi
SERVER=sluice-check-$$

# shellcheck disable=SC2317 # called by the trap
clean_up() {
    status=$?
    if [ $status -ne 0 ] && podman container exists "$SERVER"; then podman logs --tail 30 "$SERVER" 2>&1; fi
    podman rm --force --volumes "$SERVER" >/dev/null 2>&1 || true
    if [ -z "$KEEP" ]; then
        buildah rm --all >/dev/null 2>&1 || true
        podman rmi --all --force >/dev/null 2>&1 || true
        umount --recursive "$WORK/storage/overlay" 2>/dev/null || true
        rm -rf "$WORK"
    fi
    exit $status
}
trap clean_up EXIT
trap 'exit 130' INT TERM

# Images and containers of its own, beside those of the machine.
export CONTAINERS_STORAGE_CONF=$WORK/storage.conf CONTAINERS_CONF=$WORK/containers.conf
cat >"$CONTAINERS_STORAGE_CONF" <<TOML
[storage]
driver = "overlay"
graphroot = "$WORK/storage"
runroot = "$WORK/run"
TOML
# runc and cgroupfs also work where systemd does not run, in a container or a small virtual machine. Such a place may
# not raise the limits that podman would set by itself.
cat >"$CONTAINERS_CONF" <<TOML
[containers]
default_ulimits = ["nofile=$(ulimit -Hn):$(ulimit -Hn)", "nproc=32768:32768"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
TOML

# Where no systemd runs, podman logs that it cannot time the health checks; here one is run by hand.
podman() { command podman --log-level fatal "$@"; }

# build CONTEXT TAG: the project's own Dockerfile. Docker's format, since the other one has no HEALTHCHECK.
build() {
    buildah build --isolation chroot --format docker --layers --file "$1/deploy/Dockerfile" \
        --build-arg "BASE_IMAGE=$BASE_IMAGE" --build-arg "DEVICE=$DEVICE" --tag "$2" "${BUILD_OPTIONS[@]}" "$1" \
        >"$WORK/build.log" 2>&1 || { tail -n 40 "$WORK/build.log"; die "the build of $2"; }
}

make_base() {
    BASE_IMAGE=localhost/debian-python:$SUITE
    # Made anew it would be another image, on which no layer of an earlier run fits.
    if podman image exists "$BASE_IMAGE"; then return; fi
    tarball=$CACHE/debian-python-$SUITE.tar
    if [ ! -f "$tarball" ]; then
        say "making a Debian $SUITE with Python"
        mkdir -p "$CACHE"
        debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates "$SUITE" "$WORK/debian" ${MIRROR:+"$MIRROR"} \
            >"$WORK/debootstrap.log" 2>&1 || { tail -n 20 "$WORK/debootstrap.log"; die "debootstrap"; }
        rm -rf "$WORK"/debian/var/cache/apt/archives/*.deb "$WORK"/debian/var/lib/apt/lists/*
        tar -C "$WORK/debian" -cf "$tarball.part" . && mv "$tarball.part" "$tarball"
        rm -rf "$WORK/debian"
    fi
    container=$(buildah from scratch)
    buildah add --quiet "$container" "$tarball" / >/dev/null
    buildah config --cmd /bin/bash "$container"
    buildah commit --quiet --rm "$container" "$BASE_IMAGE" >/dev/null
}

image_bytes() { podman image inspect --format '{{.Size}}' "$1"; }
megabytes() { printf '%d.%d MB' $(($1 / 1000000)) $(($1 % 1000000 / 100000)); }

SECONDS=0
[ -n "$BASE_IMAGE" ] || make_base

# A copy without what a checkout may hold besides, in which the update can be tried.
rm -rf "$WORK/context"
mkdir "$WORK/context"
tar -C "$ROOT" --exclude=__pycache__ -c .dockerignore LICENSE README.md pyproject.toml requirements.txt deploy server |
    tar -C "$WORK/context" -x

started=$SECONDS
say "building deploy/Dockerfile for $DEVICE on $BASE_IMAGE"
build "$WORK/context" localhost/sluice:check
say "built in $((SECONDS - started)) s"
base=$(image_bytes "$BASE_IMAGE")
size=$(image_bytes localhost/sluice:check)
say "image $(megabytes "$size"), base $(megabytes "$base"), beyond it $(megabytes $((size - base)))"
names=("the server" "the embedded model" "dependencies" "torch" "tini and the user" "the empty environment")
mapfile -t layers < <(podman history --format json localhost/sluice:check | jq '.[] | select(.size > 0) | .size')
for i in "${!names[@]}"; do say "$(printf '%12s  %s' "$(megabytes "${layers[i]}")" "${names[i]}")"; done

# A slow machine may take longer to finish the stream than the 30 s that are the default.
run_options=(--env SLUICE_SHUTDOWN_TIMEOUT=120 --read-only --tmpfs /tmp --cap-drop all --security-opt no-new-privileges --publish 127.0.0.1::8000)
if [ "$DEVICE" = cuda ] && nvidia-smi -L >/dev/null 2>&1; then run_options+=(--device nvidia.com/gpu=all); fi
started=$SECONDS
podman run --detach --name "$SERVER" "${run_options[@]}" localhost/sluice:check >/dev/null
URL=http://$(podman port "$SERVER" 8000)
until curl --silent --fail --max-time 5 "$URL/ready" >/dev/null; do
    [ "$(podman inspect --format '{{.State.Running}}' "$SERVER")" = true ] || die "the server ended before it was ready"
    [ $((SECONDS - started)) -lt 600 ] || die "not ready within 10 minutes"
    sleep 1
done
say "ready $((SECONDS - started)) s after its first start"
say "runs as $(podman exec "$SERVER" id)"
if podman exec --user 0 "$SERVER" touch /opt/venv/x 2>/dev/null; then die "the root is not read-only"; fi

started=$SECONDS
podman restart --time 60 "$SERVER" >/dev/null
URL=http://$(podman port "$SERVER" 8000)
until curl --silent --fail --max-time 5 "$URL/ready" >/dev/null; do
    [ $((SECONDS - started)) -lt 300 ] || die "not ready within 5 minutes of a restart"
    sleep 0.2
done
say "ready $((SECONDS - started)) s after a restart, stop included"

# complete JSON [curl options]
complete() {
    curl --silent --show-error --fail --max-time 300 --header 'Content-Type: application/json' --data "$@" "$URL/v1/completions"
}
answer=$(complete '{"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}' | jq '.choices[0].text')
say "completion of 'The capital of France is': $answer"
[[ $answer == *Paris* ]] || die "that is no answer"


podman healthcheck run "$SERVER" >/dev/null || die "the health check fails"
say "healthy: $(podman inspect --format '{{.State.Health.Status}}' "$SERVER")"

# SIGTERM once the stream has begun. The server takes it through tini; the stream must end as it would have otherwise.
stream=$WORK/stream.txt
: >"$stream"
complete "{\"prompt\": \"Once upon a time\", \"max_tokens\": $ANSWER_TOKENS, \"ignore_eos\": true, \"stream\": true,
    \"stream_options\": {\"include_usage\": true}}" --no-buffer >"$stream" &
client=$!
until [ "$(grep -c '^data: ' "$stream")" -ge 10 ]; do
    kill -0 "$client" 2>/dev/null || die "the stream ended early: $(tail -c 500 "$stream")"
    sleep 0.1
done
say "SIGTERM after $(grep -c '^data: ' "$stream") events of the stream"
started=$SECONDS
podman stop --time 150 "$SERVER" >/dev/null &
stopping=$!
sleep 1
draining=$(curl --silent --max-time 5 --output /dev/null --write-out '%{http_code}' "$URL/ready" || true)
wait "$client" || die "the stream was cut: $(tail -c 500 "$stream")"
wait "$stopping" || die "podman stop"
[ "$draining" = 503 ] || die "/ready was $draining while the server drained, not 503"
[ "$(tail -n 2 "$stream" | head -n 1)" = 'data: [DONE]' ] || die "the stream does not end in [DONE]: $(tail -c 500 "$stream")"
tokens=$(sed -n 's/^data: {/{/p' "$stream" | jq 'select(.usage != null) | .usage.completion_tokens' | tail -n 1)
[ "$tokens" = "$ANSWER_TOKENS" ] || die "the stream brought $tokens tokens of $ANSWER_TOKENS"
code=$(podman inspect --format '{{.State.ExitCode}}' "$SERVER")
[ "$code" = 0 ] || die "exit code $code"
podman logs "$SERVER" >"$WORK/server.log" 2>&1
grep -q 'stopped$' "$WORK/server.log" || die "the log does not say that it stopped"
say "drained in $((SECONDS - started)) s: /ready 503 meanwhile, all $tokens tokens came, [DONE], exit code 0"
tail -n 5 "$WORK/server.log" | sed 's/^/    /'

# What an update of the server moves: one file of it changes.
echo '# changed' >>"$WORK/context/server/engine.py"
started=$SECONDS
build "$WORK/context" localhost/sluice:update
say "built again with one file of the server changed, in $((SECONDS - started)) s"
rm -rf "$WORK/registry"
podman push --quiet --compress localhost/sluice:update "dir:$WORK/registry" >/dev/null
digests() { podman image inspect "localhost/sluice:$1" | jq --raw-output '.[0].RootFS.Layers[]'; }
read -r compressed changed < <(
    paste <(digests check) <(digests update) <(jq '.layers[].size' "$WORK/registry/manifest.json") |
        awk '{ all += $3; if ($1 != $2) changed += $3 } END { print all, changed }'
)
say "compressed, as a registry keeps it: image $(megabytes "$compressed"), the update $(megabytes "$changed")"
say "passed in $SECONDS s"
