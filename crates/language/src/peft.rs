//! `adapter_config.json`: what PEFT needs to know about an adapter, besides its matrices.

use std::collections::BTreeSet;

use baton_recipe::{
    JobSpec,
    spec::{ALL_LINEAR, Adapter},
};
use serde_json::{Value, json};

use crate::adapter::{PEFT_PREFIX, is_end_of_name};

/// Name of the file with the matrices.
pub const ADAPTER_WEIGHTS: &str = "adapter_model.safetensors";
/// Name of the file that describes an adapter.
pub const ADAPTER_CONFIG: &str = "adapter_config.json";

/// End of the names of matrices `A`, after the linear layer's name.
const A: &str = ".lora_A.weight";

/// `adapter_config.json` of the adapter of a recipe, for the tensors of its checkpoint.
///
/// # Errors
/// The recipe has no adapter, or the tensors are not those of an adapter.
pub fn adapter_config(spec: &JobSpec, tensors: &[&str]) -> Result<String, String> {
    let Some(adapter) = &spec.adapter else {
        return Err(
            "has no adapter, because its recipe has no [adapter]: it has whole weights, which `baton checkpoint \
             merge --to FOLDER` writes as a model"
                .to_owned(),
        );
    };
    let targets = target_modules(adapter, tensors)?;
    // A whole number as such: other programs read it as an integer.
    let alpha = match adapter.alpha as u64 {
        whole if whole as f64 == adapter.alpha => json!(whole),
        _ => json!(adapter.alpha),
    };
    let config = json!({
        "alpha_pattern": {},
        "base_model_name_or_path": spec.model.path,
        "bias": "none",
        "fan_in_fan_out": false,
        "inference_mode": true,
        "init_lora_weights": true,
        "layers_pattern": Value::Null,
        "layers_to_transform": Value::Null,
        "lora_alpha": alpha,
        "lora_dropout": adapter.dropout,
        "modules_to_save": Value::Null,
        "peft_type": "LORA",
        "r": adapter.rank,
        "rank_pattern": {},
        "revision": Value::Null,
        "target_modules": targets,
        "task_type": "CAUSAL_LM",
        "use_rslora": adapter.rslora,
    });
    Ok(format!("{config:#}\n"))
}

/// The adapted linear layers: the last part of the name where all layers have it, or else the whole name.
fn target_modules(adapter: &Adapter, tensors: &[&str]) -> Result<BTreeSet<String>, String> {
    let mut modules = BTreeSet::new();
    for tensor in tensors {
        let path = tensor.strip_prefix(PEFT_PREFIX).and_then(|path| path.strip_suffix(A));
        let Some(path) = path else { continue };
        // A target without the number of a layer is in every layer.
        let is_number = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
        let is_everywhere = adapter.targets.iter().any(|target| {
            target == ALL_LINEAR
                || (is_end_of_name(path, target) && !target.split('.').any(is_number))
        });
        let leaf = path.rsplit('.').next().unwrap_or(path);
        modules.insert(if is_everywhere { leaf } else { path }.to_owned());
    }
    if modules.is_empty() || !tensors.len().is_multiple_of(2) {
        return Err("has tensors that are not those of an adapter".to_owned());
    }
    Ok(modules)
}

#[cfg(test)]
mod tests {
    use baton_recipe::spec::BaseFormat;

    use super::*;

    fn adapter(targets: &[&str]) -> Adapter {
        Adapter {
            rank: 4,
            alpha: 8.0,
            dropout: 0.0,
            rslora: false,
            targets: targets.iter().map(|target| (*target).to_owned()).collect(),
            base: BaseFormat::Auto,
        }
    }

    fn modules(targets: &[&str], paths: &[&str]) -> Vec<String> {
        let names = paths.iter().flat_map(|path| {
            ["lora_A", "lora_B"].map(|matrix| format!("{PEFT_PREFIX}{path}.{matrix}.weight"))
        });
        let names: Vec<String> = names.collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        target_modules(&adapter(targets), &names).unwrap().into_iter().collect()
    }

    #[test]
    fn modules_of_all_layers_have_short_names_and_others_their_whole_path() {
        let paths = [
            "model.layers.0.self_attn.q_proj",
            "model.layers.1.self_attn.q_proj",
            "model.layers.1.mlp.down_proj",
        ];
        assert_eq!(
            modules(&["self_attn.q_proj", "layers.1.mlp.down_proj"], &paths),
            ["model.layers.1.mlp.down_proj", "q_proj"]
        );
        assert_eq!(modules(&[ALL_LINEAR], &paths), ["down_proj", "q_proj"]);
        let whole: Vec<&str> = paths[..2].to_vec();
        assert_eq!(modules(&whole, &paths[..2]), whole);
        assert!(target_modules(&adapter(&[ALL_LINEAR]), &["fc.weight", "fc.bias"]).is_err());
    }
}
