//! How trials that train at the same time share this machine.

use baton_data::CpuShare;
use baton_job::exit::Failure;
use baton_recipe::{JobSpec, spec::DeviceChoice};

use crate::{
    commands::doctor,
    failure::{bad_input, failed},
    human,
};

/// What a trial may use of this machine: its part of the cores, and its GPUs if there are several trials at once.
#[derive(Debug)]
pub(super) struct MachineShare {
    pub(super) cores: CpuShare,
    /// As `CUDA_VISIBLE_DEVICES` has them.
    pub(super) gpus: Option<String>,
}

/// The shares of `count` trials.
pub(super) async fn slots(
    spec: &JobSpec,
    count: u32,
    ranks: Option<u32>,
) -> Result<Vec<MachineShare>, Failure> {
    if count == 1 {
        return Ok(vec![MachineShare { cores: CpuShare::of_rank(0, 1), gpus: None }]);
    }
    let devices: Vec<String> = match std::env::var("CUDA_VISIBLE_DEVICES") {
        _ if spec.cluster.device == DeviceChoice::Cpu => Vec::new(),
        Ok(list) => {
            list.split(',').map(str::to_owned).filter(|device| !device.is_empty()).collect()
        }
        Err(_) => {
            let machine = doctor::machine().await.map_err(failed)?;
            (0..machine.gpus.len()).map(|device| device.to_string()).collect()
        }
    };
    let shares = gpu_shares(&devices, count, ranks).map_err(bad_input)?;
    let slot = |(number, gpus)| MachineShare { cores: CpuShare::of_rank(number, count), gpus };
    Ok((0..count).zip(shares).map(slot).collect())
}

/// The GPUs of each of `count` slots, as `CUDA_VISIBLE_DEVICES` has them; `None` on a machine without.
fn gpu_shares(
    devices: &[String],
    count: u32,
    ranks: Option<u32>,
) -> Result<Vec<Option<String>>, String> {
    let count = count as usize;
    if devices.is_empty() {
        return Ok(vec![None; count]);
    }
    let each = ranks.map_or(devices.len() / count, |ranks| ranks as usize);
    if each == 0 || each * count > devices.len() {
        let gpus = human::count(devices.len() as u64, "GPU");
        return Err(format!(
            "--at-once {count}: there are too few GPUs, {gpus}; each rank needs one"
        ));
    }
    Ok(devices.chunks(each).take(count).map(|share| Some(share.join(","))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trials_at_once_share_the_gpus() {
        let devices =
            |count: usize| (0..count).map(|device| device.to_string()).collect::<Vec<_>>();
        let shares = |gpus, count, ranks| gpu_shares(&devices(gpus), count, ranks);
        let some = |list: [&str; 2]| Ok(list.map(|gpus| Some(gpus.to_owned())).to_vec());
        assert_eq!(shares(8, 2, None), some(["0,1,2,3", "4,5,6,7"]));
        assert_eq!(shares(8, 2, Some(1)), some(["0", "1"]));
        assert_eq!(shares(3, 2, None), some(["0", "1"]));
        assert_eq!(shares(0, 2, Some(3)), Ok(vec![None, None]));
        assert!(shares(1, 2, None).unwrap_err().contains("too few GPUs, 1 GPU;"));
        assert!(shares(4, 2, Some(3)).unwrap_err().contains("too few GPUs, 4 GPUs;"));
    }
}
