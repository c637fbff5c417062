//! GGUF files that become model folders, and those that are refused.
#![allow(clippy::unwrap_used, reason = "a test may fail loudly")]

mod kit;

use std::{fs, path::Path};

use baton_language::{
    GgufFile, GgufModel, NewFolder, RopeScaling, WeightSource, model::read_decoder,
    output::MAX_FILE_BYTES,
};
use baton_model::Float;
use kit::gguf::{GgufWriter, small_model};

/// A number for each name and position, exact in all formats of 16 bits.
fn value(name: &str, index: usize) -> f32 {
    let seed = name.bytes().map(usize::from).sum::<usize>();
    ((seed * 31 + index * 7) % 61) as f32 - 30.0
}

fn import(file: &Path, to: &Path, kind: Float) -> Result<(), String> {
    let file = GgufFile::open(file).map_err(|error| error.to_string())?;
    let model = GgufModel::new(&file, kind).map_err(|error| error.to_string())?;
    let folder = NewFolder::create(to).unwrap();
    model.write(&folder, MAX_FILE_BYTES, &mut |_| {}).map_err(|error| error.to_string())?;
    folder.finish().unwrap();
    Ok(())
}

fn refused(bytes: &[u8]) -> String {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    fs::write(&path, bytes).unwrap();
    import(&path, &folder.path().join("hf"), Float::F32).unwrap_err()
}

fn values(folder: &Path, name: &str) -> Vec<f32> {
    let source = WeightSource::open(folder).unwrap();
    let (kind, bytes) = source.read(name).unwrap();
    kind.decode(&bytes)
}

#[test]
fn every_architecture_becomes_a_folder_with_all_tensors_of_its_family() {
    for (architecture, family) in [
        ("llama", "llama"),
        ("qwen2", "qwen2"),
        ("qwen3", "qwen3"),
        ("gemma2", "gemma2"),
        ("gemma3", "gemma3_text"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let (path, to) = (folder.path().join("model.gguf"), folder.path().join("hf"));
        small_model(architecture, value).write(&path);
        import(&path, &to, Float::Bf16).unwrap();
        let (text, decoder) = read_decoder(&to).unwrap();
        assert_eq!((decoder.family.as_str(), decoder.ties_head), (family, true));
        assert_eq!((decoder.norm_eps, decoder.head_dim, decoder.max_positions), (1e-5, 4, 128));
        assert_eq!(decoder.layers[1].rope.theta, if family == "gemma3_text" { 1e4 } else { 5e4 });
        assert!(text.contains("\"torch_dtype\": \"bfloat16\""), "{text}");
        WeightSource::open(&to).unwrap().check(&decoder.tensors()).unwrap();

        let same: Vec<f32> = (0..12 * 8).map(|index| value("blk.1.ffn_up.weight", index)).collect();
        assert_eq!(values(&to, "model.layers.1.mlp.up_proj.weight"), same);
        let less = if decoder.has_post_norms { 1.0 } else { 0.0 };
        let norm: Vec<f32> =
            (0..8).map(|index| value("blk.1.ffn_norm.weight", index) - less).collect();
        let name = match decoder.has_post_norms {
            true => "pre_feedforward_layernorm",
            false => "post_attention_layernorm",
        };
        assert_eq!(values(&to, &format!("model.layers.1.{name}.weight")), norm);
    }
}

#[test]
fn rows_of_queries_and_keys_get_the_order_of_transformers_back() {
    let folder = tempfile::tempdir().unwrap();
    for (architecture, order) in [("llama", [0, 2, 1, 3]), ("qwen2", [0, 1, 2, 3])] {
        let (path, to) = (folder.path().join("model.gguf"), folder.path().join(architecture));
        // Each value is the number of its row.
        small_model(architecture, |_, index| (index / 8) as f32).write(&path);
        import(&path, &to, Float::F32).unwrap();
        for (name, heads) in [("q_proj", 4), ("k_proj", 2)] {
            let rows: Vec<f32> = values(&to, &format!("model.layers.0.self_attn.{name}.weight"))
                .chunks_exact(8)
                .map(|row| row[0])
                .collect();
            let expected = (0..heads).flat_map(|head| order.map(|row| (head * 4 + row) as f32));
            assert_eq!(rows, expected.collect::<Vec<_>>(), "{architecture} {name}");
        }
    }
}

#[test]
fn positions_of_llama_3_are_found_in_its_factors() {
    let theta: f64 = 5e5;
    // Heads of 64 values; scaled by 8 above a wavelength of 8192, not at all below 2048.
    let factors = (0..32).map(|index| {
        let wavelength = std::f64::consts::TAU * theta.powf(f64::from(index) / 32.0);
        let smooth = ((8192.0 / wavelength - 1.0) / 3.0).clamp(0.0, 1.0);
        (1.0 / ((1.0 - smooth) / 8.0 + smooth)) as f32
    });
    let factors: Vec<f32> = factors.collect();
    let mut writer = GgufWriter::default();
    writer.text("general.architecture", "llama");
    for (name, number) in [
        ("block_count", 1),
        ("context_length", 131_072),
        ("embedding_length", 64),
        ("feed_forward_length", 2),
        ("attention.head_count", 1),
        ("rope.dimension_count", 64),
    ] {
        writer.integer(&format!("llama.{name}"), number);
    }
    writer.float("llama.rope.freq_base", 5e5);
    let square = [0.0; 64 * 64];
    for (name, shape) in [
        ("token_embd.weight", &[3_u64, 64][..]),
        ("blk.0.attn_norm.weight", &[64]),
        ("blk.0.attn_q.weight", &[64, 64]),
        ("blk.0.attn_k.weight", &[64, 64]),
        ("blk.0.attn_v.weight", &[64, 64]),
        ("blk.0.attn_output.weight", &[64, 64]),
        ("blk.0.ffn_norm.weight", &[64]),
        ("blk.0.ffn_gate.weight", &[2, 64]),
        ("blk.0.ffn_up.weight", &[2, 64]),
        ("blk.0.ffn_down.weight", &[64, 2]),
        ("output_norm.weight", &[64]),
        ("output.weight", &[3, 64]),
    ] {
        writer.floats(name, shape, &square[..shape.iter().product::<u64>() as usize]);
    }
    let mut other = writer.clone();
    writer.floats("rope_freqs.weight", &[32], &factors);
    let folder = tempfile::tempdir().unwrap();
    let (path, to) = (folder.path().join("model.gguf"), folder.path().join("hf"));
    writer.write(&path);
    import(&path, &to, Float::F32).unwrap();
    let decoder = read_decoder(&to).unwrap().1;
    let expected = RopeScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 8192.0 };
    assert_eq!((decoder.layers[0].rope.scaling, decoder.ties_head), (expected, false));

    other.floats("rope_freqs.weight", &[32], &[2.0; 32]);
    assert!(refused(&other.bytes()).contains("rope_freqs.weight that is not that of a Llama 3"));
}

#[test]
fn damaged_files_are_refused_whatever_is_damaged() {
    let writer = small_model("llama", value);
    let good = writer.bytes();
    let error = refused(&good[..good.len() - 100]);
    assert!(
        error.contains("ends before tensor") && error.contains("it is not complete"),
        "{error}"
    );
    // No length may cost memory or time before it is compared with the file.
    for position in [8, 16, 24] {
        for huge in [u64::MAX, 1 << 40] {
            let mut bytes = good.clone();
            bytes[position..position + 8].copy_from_slice(&huge.to_le_bytes());
            let error = refused(&bytes);
            assert!(error.contains(&format!("says that {huge} items follow")), "{error}");
        }
    }
    for cut in (0..good.len() / 3).step_by(37) {
        assert!(!refused(&good[..cut]).is_empty());
    }
    let key = b"llama.block_count";
    let layers = good.windows(key.len()).position(|bytes| bytes == key).unwrap() + key.len() + 4;
    let mut bytes = good.clone();
    bytes[layers..layers + 4].copy_from_slice(&[0xff, 0xff, 0xff, 0]);
    assert!(refused(&bytes).contains("has fewer tensors than its 16777215 layers"));
    assert!(refused(b"not a model").contains("is not a GGUF file"));
    let with = |at: usize, byte: u8| {
        let mut bytes = good.clone();
        bytes[at] = byte;
        bytes
    };
    assert!(refused(&with(4, 1)).contains("has version 1 of GGUF"));
    let mut big_endian = good.clone();
    big_endian[4..8].reverse();
    assert!(refused(&big_endian).contains("is big-endian"));
    // A random byte in the description is refused or changes the model; it never ends the program.
    for at in (8..1200).step_by(13) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        fs::write(&path, with(at, 0xff)).unwrap();
        let _ = import(&path, &folder.path().join("hf"), Float::F32);
    }
    let folder = tempfile::tempdir().unwrap();
    assert!(GgufFile::open(folder.path()).unwrap_err().to_string().contains("not a regular file"));
}

#[test]
fn what_is_not_computed_is_refused_by_name() {
    let refused = |change: &dyn Fn(&mut GgufWriter)| {
        let mut writer = small_model("llama", value);
        change(&mut writer);
        refused(&writer.bytes())
    };
    for (error, expected) in [
        (
            refused(&|w| {
                w.tensor("blk.9.x", &[256], 12, &[0; 144]);
            }),
            "has blk.9.x as Q4_K: only F32, F16",
        ),
        (
            refused(&|w| {
                w.tensor("x", &[8], 77, &[]);
            }),
            "the unknown type 77",
        ),
        (
            refused(&|w| {
                w.tensor("x", &[1, 33], 8, &[0; 68]);
            }),
            "rows that are no whole blocks",
        ),
        (
            refused(&|w| {
                w.floats("x", &[u64::MAX, 4], &[]);
            }),
            "a size that is too large",
        ),
        (
            refused(&|w| {
                w.floats("x", &[1], &[0.0]);
            }),
            "has the tensor x, which Baton does not know",
        ),
        (
            refused(&|w| {
                w.integer("llama.expert_count", 8);
            }),
            "has the key llama.expert_count",
        ),
        (
            refused(&|w| {
                w.integer("llama.block_count", 8);
            }),
            "has the key \"llama.block_count\" twice",
        ),
        (
            refused(&|w| {
                w.text("llama.rope.scaling.type", "yarn");
            }),
            "of type \"yarn\"",
        ),
        (
            refused(&|w| {
                w.integer("llama.rope.dimension_count", 2);
            }),
            "rotated in part",
        ),
        (
            refused(&|w| {
                w.integer("split.count", 3);
            }),
            "is one of 3 parts of a model",
        ),
        (
            refused(&|w| {
                w.integer("general.alignment", 33);
            }),
            "no power of two",
        ),
        (
            refused(&|w| {
                w.integer("general.alignment", 64);
            }),
            "a position that is not aligned",
        ),
    ] {
        assert!(error.contains(expected), "{error}");
    }
    let mut mamba = GgufWriter::default();
    mamba.text("general.architecture", "mamba");
    assert!(
        self::refused(&mamba.bytes()).contains("has the architecture \"mamba\": only llama, qwen2")
    );
    let mut part = GgufWriter::default();
    part.text("general.architecture", "llama");
    assert!(self::refused(&part.bytes()).contains("it is not a whole language model"));
}
