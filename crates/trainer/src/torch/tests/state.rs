//! The whole state: what changes it, and that the regions contain all of it.

use safetensors::{Dtype, SafeTensors, serialize, tensor::TensorView};

use super::*;
use crate::torch::{
    flat,
    weights::{self, Error, Head},
};

#[test]
fn loss_on_a_fixed_batch_falls() {
    let mut learner = learner(&[]);
    let batch = batch(8);
    let losses: Vec<f64> = (0..6).map(|step| train(&mut learner, &batch, step)).collect();
    assert!(losses[5] < 0.7 * losses[0], "{losses:?}");
}

#[test]
fn evaluation_changes_nothing_and_repeats() {
    let mut learner = learner(&[]);
    train(&mut learner, &batch(4), 0);
    let before = state(&mut learner);
    let sums = evaluated(&mut learner, &batch(8));
    assert_eq!(sums.count, 8);
    let [top1, top5] = sums.others[..] else { panic!("{sums:?}") };
    assert!(top1 <= top5 && top5 <= 8.0);
    assert_eq!(evaluated(&mut learner, &batch(8)), sums);
    assert_eq!(state(&mut learner), before);
}

#[test]
fn evaluation_of_a_sample_does_not_depend_on_its_neighbours() {
    let mut learner = learner(&[]);
    train(&mut learner, &batch(4), 0);
    let alone = evaluated(&mut learner, &batch(1)).loss;
    let two = evaluated(&mut learner, &batch(2)).loss;
    let both = batch(2);
    let (pixels, _) = both.images().unwrap();
    let second = Batch::of_images(
        &pixels[32 * 32 * 3..],
        32,
        both.labels[1..].to_vec(),
        both.samples[1..].to_vec(),
    );
    let other = evaluated(&mut learner, &second).loss;
    assert!((alone + other - two).abs() < 1e-4, "{alone} + {other} = {two}");
}

#[test]
fn regions_are_the_whole_state_bit_by_bit() {
    for optimizer in [
        &[][..],
        &["optimizer={kind='sgd', momentum=0.9, nesterov=true}"],
        &["optimizer={kind='adamw', weight_decay=0.01}"],
        &["optimizer={kind='lars', momentum=0.9, weight_decay=0.01}", "ema.decay=0.5"],
        &["optimizer={kind='lamb', weight_decay=0.01}"],
        &["optimizer={kind='muon', weight_decay=0.01, adamw=['layer[234].*']}"],
        &["precision.compute=fp16", "precision.loss_scale.growth_interval=2"],
    ] {
        let mut first = learner(optimizer);
        train(&mut first, &batch(4), 0);
        train(&mut first, &batch(8), 1);

        let mut overrides = optimizer.to_vec();
        overrides.push("seed=99");
        let mut second = learner(&overrides);
        for (to, from) in second.regions().into_iter().zip(first.regions()) {
            assert_eq!(to.name, from.name);
            host(to.buffer).copy_from_slice(host(from.buffer));
        }

        train(&mut first, &batch(4), 2);
        train(&mut second, &batch(4), 2);
        assert!(state(&mut first) == state(&mut second), "{optimizer:?}");
    }
}

#[test]
fn regions_are_named_after_the_optimizers_state() {
    let names = |overrides: &[&str]| {
        let mut learner = learner(overrides);
        learner.regions().iter().map(|region| region.name).collect::<Vec<_>>()
    };
    assert_eq!(names(&[]), ["weights", "momentum", "bn_running"]);
    assert_eq!(names(&["optimizer.momentum=0.0"]), ["weights", "bn_running"]);
    assert_eq!(
        names(&["optimizer={kind='adamw'}"]),
        ["weights", "exp_avg", "exp_avg_sq", "bn_running"]
    );
    assert_eq!(
        names(&["ema.decay=0.9", "precision.compute=fp16"]),
        ["weights", "momentum", "ema", "loss_scale", "bn_running", "bn_running_ema"]
    );
}

#[test]
fn locations_find_each_tensor_in_its_region() {
    for channels_last in ["true", "false"] {
        let mut learner = learner(&[&format!("model.channels_last={channels_last}")]);
        let tensors = learner.state_dict().unwrap();
        let locations = learner.tensors();
        assert_eq!(tensors.len(), locations.len());
        let regions: Vec<_> =
            learner.regions().into_iter().map(|r| (r.name, host(r.buffer))).collect();
        for ((name, tensor), location) in tensors.iter().zip(&locations) {
            assert_eq!(*name, location.name);
            let (_, region) = regions.iter().find(|(name, _)| *name == location.region).unwrap();
            let len: usize = location.shape.iter().product();
            let stored = &region[location.offset..location.offset + len];
            let expected =
                if location.channels_last { tensor.permute([0, 2, 3, 1]) } else { tensor.copy() };
            assert!(stored == values(&expected), "{name}");
        }
    }
}

/// A file with the tensors of `learner` after `change`.
fn export(
    learner: &TorchLearner,
    change: impl FnOnce(&mut Vec<(String, Tensor)>),
) -> tempfile::NamedTempFile {
    let mut tensors = learner.state_dict().unwrap();
    change(&mut tensors);
    let bytes: Vec<(String, Vec<usize>, Vec<u8>)> = tensors
        .into_iter()
        .map(|(name, tensor)| {
            let shape = tensor.size().into_iter().map(|side| side as usize).collect();
            let bytes = values(&tensor).into_iter().flat_map(f32::to_le_bytes).collect();
            (name, shape, bytes)
        })
        .collect();
    let views = bytes.iter().map(|(name, shape, bytes)| {
        (name, TensorView::new(Dtype::F32, shape.clone(), bytes).unwrap())
    });
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), serialize(views, None).unwrap()).unwrap();
    file
}

#[test]
fn exported_weights_load_into_any_memory_format() {
    let mut first = learner(&[]);
    train(&mut first, &batch(4), 0);
    let counter = ("bn1.num_batches_tracked".to_owned(), Tensor::from(0.0_f32));
    let file = export(&first, |tensors| tensors.push(counter));
    for channels_last in ["true", "false"] {
        let format = format!("model.channels_last={channels_last}");
        let mut second = learner(&["seed=99", &format]);
        weights::load(&mut second, file.path(), Head::FromFile).unwrap();
        for (a, b) in first.state_dict().unwrap().iter().zip(second.state_dict().unwrap()) {
            assert!(a.1.equal(&b.1), "{}", a.0);
        }
    }
}

#[test]
fn weights_in_another_number_format_are_refused_with_the_remedy() {
    let mut learner = learner(&[]);
    let file = export(&learner, |_| {});
    let (bytes, zeros) = (std::fs::read(file.path()).unwrap(), [0; 20]);
    let tensors = SafeTensors::deserialize(&bytes).unwrap().tensors();
    let views = tensors.into_iter().map(|(name, view)| match name.as_str() {
        "fc.bias" => (name, TensorView::new(Dtype::F16, vec![10], &zeros).unwrap()),
        _ => (name, view),
    });
    std::fs::write(file.path(), serialize(views, None).unwrap()).unwrap();
    let error = weights::load(&mut learner, file.path(), Head::FromFile).unwrap_err().to_string();
    assert!(error.ends_with("cannot be used: fc.bias is F16; convert them to float32"), "{error}");
}

#[test]
fn weights_of_another_network_are_refused_with_every_reason() {
    let mut learner = learner(&[]);
    let before = state(&mut learner);
    let file = export(&learner, |tensors| {
        drop(tensors.remove(0));
        tensors.last_mut().unwrap().1 = Tensor::from_slice(&[1.0_f32, 2.0]);
        tensors.push(("head.weight".to_owned(), Tensor::from(0.0_f32)));
    });
    let error = weights::load(&mut learner, file.path(), Head::FromFile).unwrap_err();
    let Error::Mismatch { problems, .. } = &error else { panic!("{error}") };
    assert_eq!(
        *problems,
        ["conv1.weight is missing", "fc.bias is [2], not [10]", "head.weight is unknown"]
    );
    let text = error.to_string();
    assert!(text.contains("head.weight is unknown; other classes need model.new_head"), "{text}");
    assert!(state(&mut learner) == before);

    let empty = export(&learner, Vec::clear);
    let error = weights::load(&mut learner, empty.path(), Head::FromFile).unwrap_err();
    let Error::Mismatch { problems, .. } = &error else { panic!("{error}") };
    let text = error.to_string();
    assert!(text.contains(&format!("; and {} more; other", problems.len() - 3)), "{text}");
    assert_eq!(text.matches("is missing").count(), 3, "{text}");
}

#[test]
fn weights_with_impossible_values_are_refused_with_the_names_of_their_tensors() {
    let mut learner = learner(&[]);
    let before = state(&mut learner);
    let file = |name: &str, value: f64| {
        export(&learner, |tensors| {
            let (_, tensor) = tensors.iter_mut().find(|(tensor, _)| tensor == name).unwrap();
            *tensor = tensor.copy();
            let _ = tensor.view(-1).get(0).fill_(value);
        })
    };
    let wrong = [
        ("layer3.0.conv1.weight", f64::NAN, "has 1 value that is not finite"),
        ("fc.bias", f64::INFINITY, "has 1 value that is not finite"),
        ("bn1.running_var", f64::NAN, "has 1 value that is not finite"),
        ("bn1.running_var", -1.0, "has 1 negative variance"),
    ];
    let wrong =
        wrong.map(|(name, value, problem)| (file(name, value), format!("{name} {problem}")));
    let negative_weight = file("fc.bias", -1.0);
    for (file, problem) in wrong {
        let error = weights::load(&mut learner, file.path(), Head::FromFile).unwrap_err();
        let Error::Values { problems, .. } = &error else { panic!("{error}") };
        assert_eq!(*problems, [problem]);
        assert!(state(&mut learner) == before);
    }
    weights::load(&mut learner, negative_weight.path(), Head::FromFile).unwrap();
}

#[test]
fn damaged_weights_are_refused() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), b"not safetensors").unwrap();
    let error = weights::load(&mut learner(&[]), file.path(), Head::FromFile).unwrap_err();
    assert!(matches!(error, Error::Format { .. }), "{error}");
    let error =
        weights::load(&mut learner(&[]), "/nowhere/at.all".as_ref(), Head::FromFile).unwrap_err();
    assert!(matches!(error, Error::Read { .. }), "{error}");
}

#[test]
fn training_begins_with_pretrained_weights_and_a_head_for_other_classes() {
    let mut first = learner(&[]);
    train(&mut first, &batch(4), 0);
    let file = export(&first, |_| {});
    let pretrained = format!("model.pretrained='{}'", file.path().display());
    let mut second = learner(&["model.num_classes=7", "model.new_head=true", &pretrained]);
    let head = second.state_dict().unwrap().split_off(first.state_dict().unwrap().len() - 2);
    second.load_initial().unwrap();
    for (a, b) in first.state_dict().unwrap().iter().zip(second.state_dict().unwrap()) {
        match head.iter().find(|(name, _)| *name == b.0) {
            Some((_, kept)) => assert!(b.1.equal(kept), "{}", a.0),
            None => assert!(a.1.equal(&b.1), "{}", a.0),
        }
    }

    let mut without = learner(&["model.num_classes=7", &pretrained]);
    let error = without.load_initial().unwrap_err().to_string();
    assert!(error.contains("model.pretrained") && error.contains("new_head"), "{error}");
}

#[test]
fn every_tensor_begins_at_a_multiple_of_64_bytes() {
    // Without alignment vectorised kernels take other paths and round differently; on every processor some kernels do.
    for options in [
        &["model.num_classes=11"][..],
        &["model.num_classes=13", "model.arch=resnet50", "ema.decay=0.5"],
        &["model.num_classes=17", "precision.compute=bf16", "model.channels_last=false"],
    ] {
        let mut learner = learner(options);
        train(&mut learner, &batch(8), 0);
        let leaf = learner.new_leaf().unwrap();
        let weights = &learner.working.parameters;
        let state = learner.state_views().unwrap().into_iter().map(|(_, view)| view);
        let gradients =
            flat::views(&learner.layout.parameters, &leaf.gradient, &learner.frozen.masters)
                .unwrap();
        let addresses: Vec<usize> = weights
            .iter()
            .chain(&leaf.statistics_views)
            .chain(&gradients)
            .map(|tensor| tensor.data_ptr() as usize)
            .chain(state.map(|tensor| tensor.data_ptr() as usize))
            .collect();
        assert!(addresses.len() > 250, "{options:?}");
        assert!(addresses.iter().all(|address| address.is_multiple_of(64)), "{options:?}");
    }
}

#[test]
fn all_blocks_except_the_head_can_be_frozen() {
    let frozen = "model.freeze=['stem', 'layer1', 'layer2', 'layer3', 'layer4']";
    let changes = [frozen, "model.pretrained=none.safetensors", "ema.decay=0.5"];
    let mut learner = learner(&changes);
    let lens: Vec<_> =
        learner.regions().into_iter().map(|region| (region.name, region.buffer.len())).collect();
    assert!(lens.contains(&("bn_running", 0)) && lens.contains(&("bn_running_ema", 0)));
    let before = learner.state_dict().unwrap();
    train(&mut learner, &batch(8), 0);
    let _ = learner.logits(&batch(8), crate::torch::BatchNormMode::Training).unwrap();
    for ((name, before), (_, after)) in before.iter().zip(learner.state_dict().unwrap()) {
        assert_eq!(before.equal(&after), !name.starts_with("fc."), "{name}");
    }
}
