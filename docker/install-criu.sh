#!/bin/sh
# Install CRIU from Debian, as root. If this release has a package that works on the running kernel, install that.
# Otherwise build the source package of Debian's development release, which takes 40 s: Debian 12's own 3.17 fails on
# kernels since 6.x. Nothing else of the system is upgraded, because apt's lists for that release are in a directory of
# their own.
set -eu

works() { command -v criu >/dev/null && criu check >/dev/null 2>&1; }
if works; then exit 0; fi

apt-get update -qq
candidate=$(apt-cache policy criu | sed -n 's/ *Candidate: //p')
if dpkg --compare-versions "${candidate:-0}" ge 4 && [ "$candidate" != "(none)" ]; then
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends criu >/dev/null
    if works; then exit 0; fi
fi

DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
    gcc make pkg-config python3 xz-utils protobuf-c-compiler protobuf-compiler libbsd-dev libcap-dev libnet1-dev \
    libnl-3-dev libprotobuf-c-dev libprotobuf-dev uuid-dev >/dev/null

# The version that was tested, and the digest of its source. Another version is accepted only with its own digest.
version=${CRIU_VERSION:-4.2.1}
digest=${CRIU_SHA256:-29ec0ee09e296479fe7048c80980e8ef1d0684d0b0204c2b101dfea19f6725b9}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
mkdir -p lists/partial
# apt downloads as an ordinary user.
chown -R _apt "$work"
echo "deb-src ${DEBIAN_MIRROR:-http://deb.debian.org/debian} sid main" >sources.list
# A mirror may be behind. An old list does no harm, because the digest says what is accepted.
apt_sid() {
    apt-get -qq -o Acquire::Check-Valid-Until=false -o Dir::Etc::sourcelist="$work/sources.list" -o Dir::Etc::sourceparts=/dev/null \
        -o Dir::State::lists="$work/lists" "$@"
}
apt_sid update
# The archive may lack Debian's own patches of this version; the upstream source is enough.
apt_sid source --download-only criu 2>/dev/null || true
archive=$(ls "criu_$version.orig.tar."* 2>/dev/null || true)
if ! echo "$digest  $archive" | sha256sum --check --status 2>/dev/null; then
    echo "Debian's source of CRIU ($(ls criu_*.orig.tar.* 2>/dev/null)) is not the tested version $version." \
        "Set CRIU_VERSION and CRIU_SHA256 to build it." >&2
    exit 1
fi
mkdir source
tar -C source --strip-components=1 -xf "$archive"
make -s -C source -j"$(nproc)" criu >build.log 2>&1 || { tail -20 build.log >&2; exit 1; }
install -m 755 source/criu/criu /usr/local/sbin/criu
/usr/local/sbin/criu check
