//! Detects this node's network hardware. [`baton_job::gpu::fabric`] derives NCCL's settings from it.

use std::{
    env, fs,
    net::{IpAddr, ToSocketAddrs},
    path::{Path, PathBuf},
};

use baton_job::gpu::fabric::{EfaPlugin, Fabric};
use sysinfo::Networks;

/// Folder with one entry for each RDMA adapter (EFA adapters are among them), with a link to its driver.
const ADAPTERS_DIR: &str = "/sys/class/infiniband";
/// Name of EFA's driver.
const EFA_DRIVER: &str = "efa";
/// Files of NCCL's plugin for EFA; the first that exists counts.
const PLUGINS: [(&str, EfaPlugin); 2] =
    [("libnccl-net.so", EfaPlugin::Default), ("libnccl-net-ofi.so", EfaPlugin::Ofi)];
/// Folder with the dynamic loader's configuration files; packages of aws-ofi-nccl add a file for their library folder.
const LOADER_CONFIG_DIR: &str = "/etc/ld.so.conf.d";

/// Detects the network of this node, whose ranks other nodes reach at `host`.
pub(super) fn detect(host: &str) -> Fabric {
    let libraries = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let folders = env::split_paths(&libraries).chain(loader_folders(Path::new(LOADER_CONFIG_DIR)));
    Fabric {
        interface: interface(&addresses(host)),
        efa_adapters: adapters(Path::new(ADAPTERS_DIR)),
        plugin: plugin(&folders.collect::<Vec<_>>()),
    }
}

fn plugin(folders: &[PathBuf]) -> Option<EfaPlugin> {
    let is_in_any = |name: &str| folders.iter().any(|folder| folder.join(name).exists());
    PLUGINS.into_iter().find_map(|(name, plugin)| is_in_any(name).then_some(plugin))
}

/// Library folders listed in the configuration files in `folder`, one on each line.
fn loader_folders(folder: &Path) -> Vec<PathBuf> {
    let files = fs::read_dir(folder).into_iter().flatten().flatten();
    let texts = files.filter_map(|file| fs::read_to_string(file.path()).ok());
    texts.flat_map(|text| text.lines().map(|line| line.trim().into()).collect::<Vec<_>>()).collect()
}

/// Addresses on which other nodes can reach this one.
fn addresses(host: &str) -> Vec<IpAddr> {
    // Only the addresses are needed; the port is arbitrary.
    let found = (host, 0).to_socket_addrs().into_iter().flatten().map(|address| address.ip());
    found.filter(|address| !address.is_loopback() && !address.is_unspecified()).collect()
}

/// The first interface that has one of these addresses. A host name may resolve to addresses of other machines too.
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
    entries.filter_map(driver).filter(|driver| driver.ends_with(EFA_DRIVER)).count()
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
    fn plugin_is_found_in_a_folder_of_the_loader() {
        let folder = tempfile::tempdir().unwrap();
        let (loader, library) = (folder.path().join("ld.so.conf.d"), folder.path().join("lib"));
        fs::create_dir(&loader).unwrap();
        fs::create_dir(&library).unwrap();
        fs::write(loader.join("100_ofinccl.conf"), format!("{}\n", library.display())).unwrap();
        assert_eq!(plugin(&loader_folders(&loader)), None);
        fs::write(library.join("libnccl-net-ofi.so"), "").unwrap();
        assert_eq!(plugin(&loader_folders(&loader)), Some(EfaPlugin::Ofi));
        fs::write(library.join("libnccl-net.so"), "").unwrap();
        assert_eq!(plugin(&loader_folders(&loader)), Some(EfaPlugin::Default));
        assert_eq!(plugin(&loader_folders(&folder.path().join("none"))), None);
    }

    #[test]
    fn loopback_or_unknown_host_has_no_interface() {
        assert_eq!(detect("127.0.0.1").interface, None);
        assert_eq!(detect("localhost").interface, None);
        assert_eq!(detect("no such host").interface, None);
    }
}
