//! Values are moved from any layout to any other, by the names of their tensors.

use std::collections::BTreeMap;

use baton_checkpoint::{
    ALIGNMENT, FlatRegion, Float, LayoutMapping, StateLayout, TensorInfo, slice_of,
};
use baton_job::Rank;
use proptest::prelude::*;

const REGIONS: [&str; 6] =
    ["weights", "momentum", "ema", "bn_running", "bn_running_ema", "loss_scale"];

/// A tensor of a model, and whether it is frozen in a layout.
#[derive(Clone, Debug)]
struct Tensor {
    name: String,
    len: usize,
    is_statistic: bool,
    is_frozen: bool,
}

/// Lays tensors out in their order, each at a multiple of `align`.
fn lay_out(tensors: &[Tensor], align: usize) -> StateLayout {
    let mut ends = BTreeMap::new();
    let mut infos = Vec::new();
    for Tensor { name, len, is_statistic, is_frozen } in tensors {
        let region = match (is_frozen, is_statistic) {
            (true, _) => "frozen",
            (_, true) => "bn_running",
            (_, false) => "weights",
        };
        let end: &mut usize = ends.entry(region).or_default();
        let offset = end.next_multiple_of(align);
        *end = offset + len;
        let (name, shape, region) = (name.clone(), vec![*len], region.to_owned());
        infos.push(TensorInfo {
            name,
            shape,
            region,
            offset,
            channels_last: false,
            integers: None,
        });
    }
    let end = |name: &str| ends.get(name).copied().unwrap_or_default();
    let (weights, statistics, frozen) = (end("weights"), end("bn_running"), end("frozen"));
    let flat = |(name, len): (&str, usize)| FlatRegion {
        name: name.to_owned(),
        float: Float::F32,
        len,
        frozen: name == "frozen",
    };
    let lens = [weights, weights, weights, statistics, statistics, 3];
    let regions = REGIONS.into_iter().zip(lens).chain((frozen > 0).then_some(("frozen", frozen)));
    StateLayout { regions: regions.map(flat).collect(), tensors: infos }
}

/// A value of a tensor in a region; unique for each combination.
fn value(region: &str, tensor: &str, index: usize) -> f32 {
    let role = REGIONS.iter().position(|known| *known == region).unwrap_or_default();
    let number: usize = tensor[1..].parse().unwrap();
    (1 + index + 100 * (1 + number) + 10_000 * role) as f32
}

/// The region that a tensor's values belong to when it is not frozen.
fn role(region: &str, is_statistic: bool) -> &str {
    match (region, is_statistic) {
        ("frozen", true) => "bn_running",
        ("frozen", false) => "weights",
        _ => region,
    }
}

/// The region whose tensors define the layout of `region`.
fn template(region: &str) -> &str {
    match region {
        "momentum" | "ema" => "weights",
        "bn_running_ema" => "bn_running",
        own => own,
    }
}

fn fill(layout: &StateLayout, tensors: &[Tensor]) -> BTreeMap<String, Vec<f32>> {
    let region = |region: &FlatRegion| {
        let mut values = vec![0.0; region.len];
        if region.name == "loss_scale" {
            values = vec![7.0, 8.0, 9.0];
        }
        for info in layout.tensors.iter().filter(|t| t.region == template(&region.name)) {
            let tensor = tensors.iter().find(|tensor| tensor.name == info.name).unwrap();
            for index in 0..tensor.len {
                let role = role(&region.name, tensor.is_statistic);
                values[info.offset + index] = value(role, &tensor.name, index);
            }
        }
        (region.name.clone(), values)
    };
    layout.regions.iter().map(region).collect()
}

/// Moves a state that is sliced among `ranks` ranks.
fn moved(
    from: &StateLayout,
    to: &StateLayout,
    state: &BTreeMap<String, Vec<f32>>,
    ranks: u32,
) -> BTreeMap<String, Vec<f32>> {
    let moves = LayoutMapping::between(from, to).unwrap();
    let zeros = to.regions.iter().map(|r| (r.name.clone(), vec![0.0; r.words()]));
    let mut moved: BTreeMap<String, Vec<f32>> = zeros.collect();
    for rank in (0..ranks).map(Rank) {
        for (region, values) in state {
            let slice = slice_of(values.len(), rank, ranks);
            for part in moves.parts(region, slice.clone()) {
                let target = moved.get_mut(part.region).unwrap();
                target[part.to].copy_from_slice(&values[slice.clone()][part.from]);
            }
        }
    }
    moved
}

fn models() -> impl Strategy<Value = (Vec<Tensor>, Vec<Tensor>)> {
    let tensor = (1usize..40, any::<bool>(), any::<bool>(), any::<bool>());
    let tensors = proptest::collection::vec(tensor, 1..12);
    tensors.prop_flat_map(|tensors| {
        let with = |frozen: fn(&(usize, bool, bool, bool)) -> bool| -> Vec<Tensor> {
            let tensor = |(number, of): (usize, &(usize, bool, bool, bool))| Tensor {
                name: format!("t{number}"),
                len: of.0,
                is_statistic: of.1,
                is_frozen: frozen(of),
            };
            tensors.iter().enumerate().map(tensor).collect()
        };
        (Just(with(|of| of.2)), Just(with(|of| of.3)).prop_shuffle())
    })
}

proptest! {
    #[test]
    fn every_value_is_moved_to_its_position(
        (before, after) in models(),
        align in prop_oneof![Just(1), Just(ALIGNMENT)],
        ranks in 1u32..5,
    ) {
        let (from, to) = (lay_out(&before, align), lay_out(&after, ALIGNMENT));
        let moved = moved(&from, &to, &fill(&from, &before), ranks);

        let mut expected = fill(&to, &after);
        for (region, values) in &mut expected {
            for info in to.tensors.iter().filter(|t| t.region == template(region)) {
                let was = before.iter().find(|tensor| tensor.name == info.name).unwrap();
                let span = info.offset..info.offset + was.len;
                for (index, value_there) in values[span].iter_mut().enumerate() {
                    match region.as_str() {
                        // A frozen tensor has no moments, and its average equals its value.
                        "momentum" if was.is_frozen => *value_there = 0.0,
                        "ema" | "bn_running_ema" if was.is_frozen => {
                            *value_there =
                                value(role("frozen", was.is_statistic), &was.name, index);
                        }
                        _ => {}
                    }
                }
            }
        }
        prop_assert_eq!(moved, expected);
    }

    #[test]
    fn an_equal_layout_moves_whole_slices((model, _) in models(), ranks in 1u32..5) {
        let layout = lay_out(&model, ALIGNMENT);
        let moves = LayoutMapping::between(&layout, &layout).unwrap();
        prop_assert!(moves.is_identity());
        for region in &layout.regions {
            for rank in (0..ranks).map(Rank) {
                let slice = slice_of(region.len, rank, ranks);
                let parts: Vec<_> = moves.parts(&region.name, slice.clone()).collect();
                prop_assert_eq!(parts.len(), usize::from(!slice.is_empty()));
                prop_assert!(parts.iter().all(|part| part.region == region.name && part.to == slice));
            }
        }
    }
}

fn problems(from: &StateLayout, to: &StateLayout) -> Vec<String> {
    LayoutMapping::between(from, to).unwrap_err()
}

fn model() -> StateLayout {
    let tensor = |number, len| Tensor {
        name: format!("t{number}"),
        len,
        is_statistic: number == 3,
        is_frozen: false,
    };
    lay_out(&[tensor(1, 4), tensor(2, 3), tensor(3, 2)], ALIGNMENT)
}

#[test]
fn every_difference_of_models_is_reported() {
    let (mut from, mut to) = (model(), model());
    from.tensors[0].name = "t9".to_owned();
    from.tensors[1].shape = vec![1, 3];
    assert_eq!(
        problems(&from, &to),
        ["it has no t1 [4]", "its t2 is [1, 3], not [3]", "only it has t9 [4]"]
    );
    from = model();
    from.regions.retain(|region| !region.name.contains("ema"));
    assert_eq!(problems(&from, &to), ["it has no ema", "it has no bn_running_ema"]);
    assert_eq!(problems(&to, &from), ["only it has ema", "only it has bn_running_ema"]);
    to = model();
    from = model();
    from.regions[5].len = 4;
    assert_eq!(problems(&from, &to), ["its loss_scale has 4 values, not 3"]);
    from = model();
    from.tensors[0].channels_last = true;
    assert_eq!(problems(&from, &to), ["its t1 is in channels-last order"]);
}

#[test]
fn a_frozen_tensor_of_another_type_is_reported() {
    let tensors = [Tensor { name: "t0".into(), len: 4, is_statistic: false, is_frozen: true }];
    let (from, mut to) = (lay_out(&tensors, ALIGNMENT), lay_out(&tensors, ALIGNMENT));
    to.regions[6].float = Float::Bf16;
    assert_eq!(problems(&from, &to), ["its t0 is F32, not BF16"]);
}

#[test]
fn a_region_that_is_too_short_for_its_tensors_is_reported() {
    let (mut from, to) = (model(), model());
    from.regions[1].len = 5;
    assert_eq!(problems(&from, &to), ["t2 is outside region momentum"]);
}
