//! Writes `seeds/`: small inputs of every kind, which libFuzzer starts with.
//!
//! After a change of this file: `cargo run --workspace --features baton-fuzz/libfuzzer --example seeds`.
//!
//! Files are made from files of ffcv (`crates/data/tests/fixtures`): a few samples each, with small pages, and with
//! large images replaced by a small one. JPEGs are written by libjpeg-turbo.
#![allow(unsafe_code)] // Calls of libjpeg-turbo's compressor.

use std::{
    ffi::c_int,
    fs,
    io::Read,
    path::{Path, PathBuf},
};

use baton_data::{
    Beton,
    beton::{Field, FieldType},
};
use baton_fuzz::{damage::FRAME_BYTES, file::Scratch};
use turbojpeg_sys as sys;

const GREY: &[u8] = include_bytes!("../../crates/data/tests/fixtures/grey-16x8.jpg");
const CMYK: &[u8] = include_bytes!("../../crates/data/tests/fixtures/cmyk-16x8.jpg");
/// Largest stored image that is not replaced, bytes.
const MAX_IMAGE_BYTES: usize = 500;

fn main() {
    checkpoints();
    let all_fields = cut("f_allfields", 0..3);
    let layouts = cut("f2_layouts", 0..2);
    let scalars = cut("f4_scalars_only", 0..4);
    let empty = cut("f5_empty_bytes", 0..5);
    let mixed = cut("e2_const96x64_mixed", 0..4);
    let image_only = cut("f3_imageonly", 0..3);
    let two_workers = cut("k_two_workers", 14..20);
    let without_last_entry = |file: &[u8]| file[..file.len() - 24].to_vec();

    save("open", "mixed", &mixed);
    save("open", "scalars", &scalars);
    save("open", "empty_bytes", &empty);
    save("open", "cut_off", &without_last_entry(&mixed));
    save("open", "header", &mixed[..24]);
    save("table", "mixed", &mixed);
    save("table", "image_only", &image_only);
    save("table", "two_workers", &two_workers);
    save("table", "empty_bytes", &empty);
    save("table", "cut_off", &without_last_entry(&mixed));
    save("fields", "all_fields", &all_fields);
    save("fields", "layouts", &layouts);
    save("fields", "scalars", &scalars);
    save("fields", "empty_bytes", &empty);
    save("fields", "mixed", &mixed);

    let jpegs = [
        ("grey", GREY.to_vec()),
        ("cmyk", CMYK.to_vec()),
        ("444", jpeg(40, 24, &[])),
        ("422", jpeg(40, 24, &[(sys::TJPARAM_TJPARAM_SUBSAMP, sys::TJSAMP_TJSAMP_422)])),
        ("420", jpeg(41, 37, &[(sys::TJPARAM_TJPARAM_SUBSAMP, sys::TJSAMP_TJSAMP_420)])),
        ("440", jpeg(24, 33, &[(sys::TJPARAM_TJPARAM_SUBSAMP, sys::TJSAMP_TJSAMP_440)])),
        ("411", jpeg(70, 20, &[(sys::TJPARAM_TJPARAM_SUBSAMP, sys::TJSAMP_TJSAMP_411)])),
        ("441", jpeg(20, 40, &[(sys::TJPARAM_TJPARAM_SUBSAMP, sys::TJSAMP_TJSAMP_441)])),
        ("grey_large", jpeg(90, 70, &[(sys::TJPARAM_TJPARAM_SUBSAMP, sys::TJSAMP_TJSAMP_GRAY)])),
        ("progressive_444", jpeg(32, 24, &[(sys::TJPARAM_TJPARAM_PROGRESSIVE, 1)])),
        (
            "progressive_420",
            jpeg(
                50,
                40,
                &[
                    (sys::TJPARAM_TJPARAM_PROGRESSIVE, 1),
                    (sys::TJPARAM_TJPARAM_SUBSAMP, sys::TJSAMP_TJSAMP_420),
                ],
            ),
        ),
        ("arithmetic", jpeg(32, 24, &[(sys::TJPARAM_TJPARAM_ARITHMETIC, 1)])),
        ("restarts", jpeg(32, 24, &[(sys::TJPARAM_TJPARAM_RESTARTBLOCKS, 2)])),
        ("lossless", jpeg(16, 12, &[(sys::TJPARAM_TJPARAM_LOSSLESS, 1)])),
        ("rgb", jpeg(32, 24, &[(sys::TJPARAM_TJPARAM_COLORSPACE, sys::TJCS_TJCS_RGB as c_int)])),
    ];
    for (number, (name, jpeg)) in (0_u8..).zip(&jpegs) {
        // Each input selects another part.
        let selection =
            |flags: u8| [flags, 15 * number, 10 * number, 250, 200 - number, 7 + number, 9, 0];
        assert_eq!(selection(0).len(), FRAME_BYTES);
        save("jpeg", name, &[&selection(number % 7), jpeg.as_slice()].concat());
        save(
            "jpeg",
            &format!("{name}_cut_off"),
            &[&selection(8), &jpeg[..jpeg.len() * 2 / 3]].concat(),
        );
        save("jpeg", &format!("{name}_area"), &[&selection(32), jpeg.as_slice()].concat());
    }
    // Rendered very small: the inverse DCT already reduces the image.
    for (name, jpeg) in &jpegs {
        save(
            "jpeg",
            &format!("{name}_small"),
            &[&[0, 0, 0, 255, 255, 1, 9, 0], jpeg.as_slice()].concat(),
        );
    }
    save("jpeg", "raw", &[&[7, 10, 20, 128, 128, 3, 9, 0][..], &[90; 360]].concat());
}

/// Writes manifests and a rank's file. `seeds/manifest/two_ranks` is not written here: it is from a real checkpoint.
fn checkpoints() {
    let manifest = baton_fuzz::SHARD_MANIFEST;
    save("manifest", "cut_off", &manifest.as_bytes()[..manifest.len() / 2]);
    save("manifest", "newer", manifest.replace("\"version\": 1", "\"version\": 99").as_bytes());
    save("manifest", "outside", manifest.replace("\"offset\": 12", "\"offset\": 13").as_bytes());
    save(
        "manifest",
        "no_ranks",
        manifest.replace("\"world_size\": 2", "\"world_size\": 0").as_bytes(),
    );

    let part = |name: &str, start: usize, len: usize| {
        let end = start + 4 * len;
        format!(r#""{name}":{{"dtype":"F32","shape":[{len}],"data_offsets":[{start},{end}]}}"#)
    };
    let parts = [part("weights", 0, 8), part("momentum", 32, 5), part("bn_running", 52, 2)];
    let file = |header: &str, values: usize| {
        let mut header = header.as_bytes().to_vec();
        header.resize(header.len().next_multiple_of(8), b' ');
        let values = (0..values).flat_map(|value| (value as f32).to_le_bytes());
        [&(header.len() as u64).to_le_bytes(), header.as_slice(), &values.collect::<Vec<u8>>()]
            .concat()
    };
    let whole = file(&format!("{{{}}}", parts.join(",")), 15);
    save("shard", "whole", &whole);
    save("shard", "cut_off", &whole[..whole.len() - 4]);
    save("shard", "header_cut_off", &whole[..40]);
    save("shard", "too_few", &file(&format!("{{{}}}", parts[..2].join(",")), 13));
    let halves = format!("{{{}}}", parts.join(",")).replace("F32", "F16");
    save("shard", "of_another_type", &file(&halves, 15));
    let metadata = format!(r#"{{"__metadata__":{{"format":"pt"}},{}}}"#, parts.join(","));
    save("shard", "with_metadata", &file(&metadata, 15));
    save(
        "shard",
        "overlapping",
        &file(&format!("{{{},{}}}", parts[0], part("momentum", 16, 5)), 15),
    );
}

fn save(target: &str, name: &str, input: &[u8]) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("seeds").join(target);
    fs::create_dir_all(&folder).expect("seeds/ can be written");
    fs::write(folder.join(name), input).expect("seeds/ can be written");
}

fn fixture(name: &str) -> Vec<u8> {
    let path: PathBuf =
        [env!("CARGO_MANIFEST_DIR"), "../crates/data/tests/fixtures", name].iter().collect();
    let mut file = Vec::new();
    let packed = fs::File::open(path.with_extension("beton.gz")).expect("the fixture exists");
    flate2::read::GzDecoder::new(packed).read_to_end(&mut file).expect("the fixture unpacks");
    file
}

/// A new file with some samples of a fixture.
fn cut(name: &str, samples: std::ops::Range<u64>) -> Vec<u8> {
    let file = fixture(name);
    let scratch = Scratch::new();
    let beton = Beton::open(scratch.fill(&file)).expect("the fixture is valid");
    let fields = beton.fields().len();
    let rows_start = 24 + 1041 * fields;
    let row_bytes = row_bytes(beton.fields());
    let values: Vec<_> = samples
        .clone()
        .flat_map(|sample| beton.fields().iter().map(move |field| (sample, field)))
        .filter_map(|(sample, field)| Some((sample, field, value(&beton, field, sample)?)))
        .collect();
    let largest = values.iter().map(|(_, _, value)| value.len()).max().unwrap_or(0);
    let page_bytes = largest.next_power_of_two().max(64);

    let mut out = file[..rows_start].to_vec();
    for sample in samples.clone() {
        let start = rows_start + row_bytes * sample as usize;
        out.extend(&file[start..start + row_bytes]);
    }
    let pages_start = out.len().next_multiple_of(page_bytes);
    out.resize(pages_start, 0);
    let mut table = Vec::new();
    for (sample, field, value) in values {
        // Like in ffcv, a value that does not fit starts a new page.
        let room = out.len().next_multiple_of(page_bytes) - out.len();
        if room < value.len() {
            out.resize(out.len() + room, 0);
        }
        let cell =
            rows_start + row_bytes * (sample - samples.start) as usize + field.offset as usize;
        let pointer = (out.len() as u64).to_le_bytes();
        let at = if field.kind == FieldType::RgbImage {
            if value.as_slice() == GREY {
                out[cell..cell + 5].copy_from_slice(&[0, 16, 0, 8, 0]);
            }
            cell + 5
        } else {
            cell
        };
        out[at..at + 8].copy_from_slice(&pointer);
        if !value.is_empty() {
            table.extend((sample - samples.start).to_le_bytes());
            table.extend(pointer);
            table.extend((value.len() as u64).to_le_bytes());
        }
        out.extend(value);
    }
    out.resize(out.len().next_multiple_of(page_bytes), 0);
    let table_start = out.len() as u64;
    out[4..8].copy_from_slice(&(page_bytes as u32).to_le_bytes());
    out[8..16].copy_from_slice(&(samples.end - samples.start).to_le_bytes());
    out[16..24].copy_from_slice(&table_start.to_le_bytes());
    out.extend(table);
    drop(beton);
    Beton::open(scratch.fill(&out)).expect("the new file is valid");
    out
}

/// Length of a row, bytes. Rows are C structs: the end of the last cell, with the largest alignment of the fields.
fn row_bytes(fields: &[Field]) -> usize {
    let packed = |kind| match kind {
        FieldType::RgbImage => (13, 1),
        FieldType::Bytes | FieldType::Json => (16, 1),
        _ => (8, 8),
    };
    let last = fields.last().expect("a file has fields");
    let end = last.offset as usize + packed(last.kind).0;
    end.next_multiple_of(fields.iter().map(|field| packed(field.kind).1).max().unwrap_or(1))
}

/// The value of a field in the pages.
fn value(beton: &Beton, field: &Field, sample: u64) -> Option<Vec<u8>> {
    let name = &field.name;
    let mut buffer = Vec::new();
    Some(match field.kind {
        FieldType::Float | FieldType::Int => return None,
        FieldType::RgbImage => {
            let column = beton.image_column(name).expect("the field exists");
            let image = beton.image(&column, sample, &mut buffer).expect("the image is valid");
            if image.bytes.len() > MAX_IMAGE_BYTES { GREY } else { image.bytes }.to_vec()
        }
        FieldType::Bytes | FieldType::Json => {
            let column = beton.bytes_column(name).expect("the field exists");
            let mut value =
                beton.bytes(&column, sample, &mut buffer).expect("the value is valid").to_vec();
            // The terminating zero byte is included.
            value.extend((field.kind == FieldType::Json).then_some(0));
            value
        }
        FieldType::NdArray | FieldType::TorchTensor => {
            let column = beton.array_column(name).expect("the field exists");
            buffer.resize(column.value_bytes() as usize, 0);
            beton.array(&column, sample, &mut buffer).expect("the value is valid");
            buffer
        }
    })
}

/// A JPEG of smooth colours with a little noise: 4:4:4 at quality 60 by default.
fn jpeg(width: u32, height: u32, parameters: &[(sys::TJPARAM, c_int)]) -> Vec<u8> {
    let pixels: Vec<u8> = (0..width * height)
        .flat_map(|i| {
            let (x, y) = (i % width, i / width);
            let noise = i.wrapping_mul(2_654_435_761) >> 27;
            [5 * x + noise, 4 * y, 3 * (x + y) + noise].map(|value| value as u8)
        })
        .collect();
    let defaults = [
        (sys::TJPARAM_TJPARAM_QUALITY, 60),
        (sys::TJPARAM_TJPARAM_SUBSAMP, sys::TJSAMP_TJSAMP_444),
    ];
    // SAFETY: pointers and sizes are those of live slices; the buffer is the library's, freed below.
    unsafe {
        let handle = sys::tj3Init(sys::TJINIT_TJINIT_COMPRESS as c_int);
        for (parameter, value) in defaults.iter().chain(parameters) {
            assert_eq!(sys::tj3Set(handle, *parameter as c_int, *value), 0);
        }
        let (mut buffer, mut len) = (std::ptr::null_mut(), 0);
        let code = sys::tj3Compress8(
            handle,
            pixels.as_ptr(),
            width as c_int,
            0,
            height as c_int,
            sys::TJPF_TJPF_RGB as c_int,
            &raw mut buffer,
            &raw mut len,
        );
        assert_eq!(code, 0);
        let jpeg = std::slice::from_raw_parts(buffer, len as usize).to_vec();
        sys::tj3Free(buffer.cast());
        sys::tj3Destroy(handle);
        jpeg
    }
}
