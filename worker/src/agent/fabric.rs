//! Looks at this node's network; what follows for NCCL is decided in [`baton_job::gpu::fabric`].

use std::{
    env, fs,
    net::{IpAddr, ToSocketAddrs},
    path::{Path, PathBuf},
};

use baton_job::gpu::fabric::Fabric;
use sysinfo::Networks;

/// Adapters for RDMA, EFA among them, each with a link to its driver.
const ADAPTERS: &str = "/sys/class/infiniband";
/// Driver of EFA.
const EFA: &str = "efa";
/// What NCCL loads by itself, and what with `NCCL_NET_PLUGIN=ofi`.
const PLUGINS: [&str; 2] = ["libnccl-net.so", "libnccl-net-ofi.so"];
/// What the loader knows beside the library path; packages of aws-ofi-nccl enter themselves.
const LOADER: &str = "/etc/ld.so.conf.d";

/// What this node has, whose ranks others reach at `host`.
pub(super) fn look(host: &str) -> Fabric {
    let libraries = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let folders = env::split_paths(&libraries).chain(known_to_the_loader(Path::new(LOADER)));
    Fabric {
        interface: interface(&addresses(host)),
        efa_adapters: adapters(Path::new(ADAPTERS)),
        has_plugin: has_plugin(folders),
    }
}

fn has_plugin(folders: impl Iterator<Item = PathBuf>) -> bool {
    let mut files = folders.flat_map(|folder| PLUGINS.map(|name| folder.join(name)));
    files.any(|file| file.exists())
}

/// Folders that the files of this one name, each on a line of its own.
fn known_to_the_loader(folder: &Path) -> Vec<PathBuf> {
    let files = fs::read_dir(folder).into_iter().flatten().flatten();
    let texts = files.filter_map(|file| fs::read_to_string(file.path()).ok());
    texts.flat_map(|text| text.lines().map(|line| line.trim().into()).collect::<Vec<_>>()).collect()
}

/// The addresses by which other nodes may reach this one; none where nobody else can.
fn addresses(host: &str) -> Vec<IpAddr> {
    // The port is of no interest.
    let found = (host, 0).to_socket_addrs().into_iter().flatten().map(|address| address.ip());
    found.filter(|address| !address.is_loopback() && !address.is_unspecified()).collect()
}

/// The first that has one of these addresses: of a name that leads elsewhere too, only some are of this machine.
fn interface(addresses: &[IpAddr]) -> Option<String> {
    let networks = Networks::new_with_refreshed_list();
    let with = |address: &IpAddr| {
        let has_it = |network: &sysinfo::NetworkData| {
            network.ip_networks().iter().any(|known| known.addr == *address)
        };
        networks.iter().find(|(_, network)| has_it(network)).map(|(name, _)| name.clone())
    };
    addresses.iter().find_map(with)
}

fn adapters(folder: &Path) -> usize {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let driver = |entry: fs::DirEntry| fs::read_link(entry.path().join("device/driver")).ok();
    entries.filter_map(driver).filter(|driver| driver.ends_with(EFA)).count()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn adapters_are_counted_by_their_driver() {
        let folder = tempfile::tempdir().unwrap();
        for (adapter, driver) in [("rdmap0s6", "efa"), ("rdmap0s7", "efa"), ("mlx5_0", "mlx5_core")]
        {
            let device = folder.path().join(adapter).join("device");
            fs::create_dir_all(&device).unwrap();
            symlink(format!("../../bus/pci/drivers/{driver}"), device.join("driver")).unwrap();
        }
        assert_eq!(adapters(folder.path()), 2);
        assert_eq!(adapters(&folder.path().join("none")), 0);
    }

    #[test]
    fn a_plugin_is_found_where_the_loader_looks() {
        let folder = tempfile::tempdir().unwrap();
        let (loader, library) = (folder.path().join("ld.so.conf.d"), folder.path().join("lib"));
        fs::create_dir(&loader).unwrap();
        fs::create_dir(&library).unwrap();
        fs::write(loader.join("100_ofinccl.conf"), format!("{}\n", library.display())).unwrap();
        assert!(!has_plugin(known_to_the_loader(&loader).into_iter()));
        fs::write(library.join("libnccl-net-ofi.so"), "").unwrap();
        assert!(has_plugin(known_to_the_loader(&loader).into_iter()));
        assert!(!has_plugin(known_to_the_loader(&folder.path().join("none")).into_iter()));
    }

    #[test]
    fn a_node_that_nobody_else_reaches_has_no_interface_for_others() {
        assert_eq!(look("127.0.0.1").interface, None);
        assert_eq!(look("localhost").interface, None);
        assert_eq!(look("no such host").interface, None);
    }
}
