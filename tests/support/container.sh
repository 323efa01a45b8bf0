#!/bin/sh
# What `docker compose up` does to two members, without an engine: a root that cannot be written, nobody's user, no
# capabilities, folders of its own for state and kernels, and the health check of the Dockerfile.
# usage: container.sh FOLDER DEPENDENCIES (FOLDER with env/ where rpel is installed, member-1/, member-2/, health.py;
# DEPENDENCIES, a site-packages folder that nobody may not be able to reach, is seen as FOLDER/dependencies)
set -eu
cd "$1"
ip link set lo up
mount --make-rprivate /
mkdir -p dependencies
mount --bind "$2" dependencies
for place in member-1/state member-2/state cache; do
    mkdir -p $place
    chown -R 65534:65534 $place
    mount --bind $place $place
done
mount -o remount,bind,ro /
nobody="setpriv --reuid 65534 --regid 65534 --clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all"
place=$PWD
member() { env -i PATH="$place/env/bin:/usr/bin:/bin" HOME=/nonexistent RPEL_CACHE="$place/cache" $nobody "$@"; }
member sh -c 'echo x > /var/tmp/x' 2>/dev/null && { echo "the root can be written" >&2; exit 1; }
member sh -c "echo x > $place/member-1/peer.toml" 2>/dev/null && { echo "peer.toml can be written" >&2; exit 1; }
first="" second=""
trap 'kill $first $second 2>/dev/null || true' EXIT INT TERM
member rpel peer run --config $place/member-1/peer.toml & first=$!
member rpel peer run --config $place/member-2/peer.toml & second=$!
until member python $place/health.py 2>/dev/null; do
    kill -0 $first || exit 1
    sleep 1
done
echo healthy
wait $first
wait $second
