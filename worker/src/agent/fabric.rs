//! Looks at this node's network; what follows for NCCL is decided in [`baton_job::gpu::fabric`].

use std::{
    env, fs,
    net::{IpAddr, ToSocketAddrs},
    path::Path,
};

use baton_job::gpu::fabric::Fabric;
use sysinfo::Networks;

/// Adapters for RDMA, EFA among them, each with a link to its driver.
const ADAPTERS: &str = "/sys/class/infiniband";
/// Driver of EFA.
const EFA: &str = "efa";
/// What NCCL looks for on the library path.
const PLUGIN: &str = "libnccl-net.so";

/// What this node has, whose ranks others reach at `host`.
pub(super) fn look(host: &str) -> Fabric {
    let libraries = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    Fabric {
        interface: address(host).and_then(interface),
        efa_adapters: adapters(Path::new(ADAPTERS)),
        has_plugin: env::split_paths(&libraries).any(|folder| folder.join(PLUGIN).exists()),
    }
}

/// The address by which other nodes reach this one; none where nobody else can.
fn address(host: &str) -> Option<IpAddr> {
    // The port is of no interest.
    let mut addresses = (host, 0).to_socket_addrs().ok()?.map(|address| address.ip());
    addresses.find(|address| !address.is_loopback() && !address.is_unspecified())
}

/// The one that has this address.
fn interface(address: IpAddr) -> Option<String> {
    let networks = Networks::new_with_refreshed_list();
    let has_it = |network: &sysinfo::NetworkData| {
        network.ip_networks().iter().any(|known| known.addr == address)
    };
    networks.iter().find(|(_, network)| has_it(network)).map(|(name, _)| name.clone())
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
    fn a_node_that_nobody_else_reaches_has_no_interface_for_others() {
        assert_eq!(look("127.0.0.1").interface, None);
        assert_eq!(look("localhost").interface, None);
        assert_eq!(look("no such host").interface, None);
    }
}
