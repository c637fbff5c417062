#!/usr/bin/env bash
# Makes what machines without pip install, in dist/: a tarball, a package for Debian and Ubuntu, and a list of all crates
# with their licences (an SBOM, CycloneDX).
#
#   scripts/dist/packages.sh [--in SUITE]     as programs.sh, which builds the programs
#
# Both contain the Python package and the programs, as the wheel does. Programs are started by a few lines of Python
# that find PyTorch's libraries. Two runs for the same programs write the same bytes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

readonly CARGO_SBOM=0.10.0

programs=$PWD/target/dist-out
stage=$PWD/target/dist-packages
tools=$PWD/target/dist-tools
version=$(sed -n 's/^VERSION = "\(.*\)"$/\1/p' python/baton/_version.py)
name=baton-$version-linux-x86_64
root=$stage/$name

scripts/dist/programs.sh "$programs" "$@"

glibc=$(cat "$programs/glibc")

rm -rf "$stage" && mkdir -p "$root/bin" dist
cp -r --parents python/baton LICENSE deploy/systemd README.md docs "$root"
find "$root" -name __pycache__ -prune -exec rm -r {} +
cp -r "$programs" "$root/python/baton/_dist"
for program in baton baton-coordinator baton-worker; do
    cat >"$root/bin/$program" <<'END'
#!/usr/bin/env python3
import os
import sys
from pathlib import Path

folder = str(Path(__file__).resolve().parent.parent / "python")
sys.dont_write_bytecode = True
sys.path.insert(0, folder)
# For `baton track` and others, which start Python again.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
from baton._launch import main

main()
END
    chmod 755 "$root/bin/$program"
done
chmod -R u=rwX,go=rX "$root"

# Times are those of the commit.
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH
find "$root" -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +
rm -f dist/baton-*.tar.xz dist/baton_*.deb dist/baton-*.cdx.json
tar --directory "$stage" --create --sort=name --owner=0 --group=0 --numeric-owner --format=gnu "$name" |
    xz --threads=1 -6 >"dist/$name.tar.xz"

debian=$stage/debian
mkdir -p "$debian/DEBIAN" "$debian/opt" "$debian/usr/bin" "$debian/lib/systemd"
cp -r --preserve=mode,timestamps "$root" "$debian/opt/baton"
cp -r --preserve=mode,timestamps deploy/systemd "$debian/lib/systemd/system"
chmod 644 "$debian"/lib/systemd/system/*
for program in baton baton-coordinator baton-worker; do
    ln -s "/opt/baton/bin/$program" "$debian/usr/bin/$program"
done
cat >"$debian/DEBIAN/control" <<END
Package: baton
Version: $version
Architecture: amd64
Maintainer: The Baton authors <baton@localhost>
Depends: libc6 (>= $glibc), python3 (>= 3.10)
Section: science
Priority: optional
Description: Distributed training that survives losing its machine
 Trains networks on spot GPUs, and goes on at the sample where the last machine stopped.
 Needs PyTorch 2.11 for the Python that starts it: pip install torch==2.11.0
END
find "$debian" -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +
dpkg-deb --root-owner-group -Zxz --build "$debian" "dist/baton_${version}_amd64.deb" >/dev/null

if [ "$("$tools/bin/cargo-sbom" --version 2>/dev/null)" != "cargo-sbom $CARGO_SBOM" ]; then
    cargo install --quiet --locked --version "$CARGO_SBOM" --root "$tools" cargo-sbom
fi
PATH=$tools/bin:$PATH cargo sbom --output-format cyclone_dx_json_1_6 >"dist/baton-$version.cdx.json"

cd dist
shopt -s nullglob
sha256sum -- *.tar.xz *.deb *.cdx.json *.whl | tee SHA256SUMS
