#!/bin/bash
# Builds deploy/Containerfile without a registry, and runs it with a read-only root as its user: prints size and start.
#
#   dev/container.sh    # as root, 8 minutes; needs buildah and debootstrap. Debian 12's Python stands for python:3.11-slim.
set -euo pipefail
cd "$(dirname "$0")/.."
export STORAGE_DRIVER=vfs BUILDAH_ISOLATION=chroot
BASE=docker.io/library/python:3.11-slim
WORK=$(mktemp -d)
trap 'buildah rm preble-base preble-try >/dev/null 2>&1 || true; rm -rf "$WORK"' EXIT

if ! buildah images --quiet "$BASE" >/dev/null 2>&1; then
  debootstrap --variant=minbase --include=python3,python3-venv,python3-dev,ca-certificates bookworm "$WORK/base" >"$WORK/log"
  ln -s /usr/bin/python3 "$WORK/base/usr/local/bin/python"
  buildah from --name preble-base scratch >/dev/null
  cp -a "$WORK/base/." "$(buildah mount preble-base)"
  buildah commit --quiet --rm preble-base "$BASE" >/dev/null
fi

CERTIFICATES=/etc/ssl/certs/ca-certificates.crt # a proxy's among them
buildah build --format docker --file deploy/Containerfile --tag preble --volume "$CERTIFICATES:$CERTIFICATES:ro" . >"$WORK/log" 2>&1 ||
  { tail -20 "$WORK/log" >&2; exit 1; }
buildah images preble

# A root that nobody can write, a /tmp in memory, and the image's own user.
buildah from --name preble-try localhost/preble >/dev/null
ROOTFS=$(buildah mount preble-try)
echo "Preble and its libraries: $(du -sm "$ROOTFS/opt/preble" | cut -f1) MB"
CHROOT=$(command -v chroot)
export ROOTFS CHROOT
unshare --mount --pid --fork --kill-child bash -euo pipefail -c '
  mount --bind "$ROOTFS" "$ROOTFS" && mount -o remount,bind,ro "$ROOTFS"
  mount -t tmpfs tmpfs "$ROOTFS/tmp" && mount -t proc proc "$ROOTFS/proc"
  inside=(env -i PATH=/opt/preble/bin:/usr/bin:/bin HOME=/tmp "$CHROOT" --userspec=10001:10001 "$ROOTFS")
  ! "${inside[@]}" touch /opt/preble/written 2>/dev/null
  "${inside[@]}" preble emulate --profile tiny-cpu --port 18197 >/dev/null 2>&1 &
  began=$(date +%s%N)
  "${inside[@]}" preble serve --replica http://127.0.0.1:18197 --port 18198 >/tmp/preble-container.log 2>&1 & gateway=$!
  for _ in $(seq 600); do
    exec 3<>/dev/tcp/127.0.0.1/18198 && break
    sleep 0.02
  done 2>/dev/null
  echo "listens after $((($(date +%s%N) - began) / 1000000)) ms"
  for _ in $(seq 30); do "${inside[@]}" preble ready --url http://127.0.0.1:18198 2>/dev/null && break; done
  kill -TERM $gateway; wait $gateway && echo "ended with status 0"'
