//! Listing the shards of a recipe's `data.train`, and errors if nothing matches.

use std::{fs, net::TcpListener};

use baton_data::{
    Error, FileFault,
    shards::{Options, Remedy, ShardSet},
};
use baton_fake_s3::BUCKET;
use tempfile::TempDir;

use crate::kit::{Kit, contents, key, source};

fn names(shards: &ShardSet) -> Vec<String> {
    (0..shards.len()).map(|shard| shards.name(shard).to_owned()).collect()
}

#[test]
fn a_pattern_finds_its_objects_in_the_order_of_their_names() {
    let kit = Kit::new(2, 2);
    for other in ["set/val-0.beton", "set/train-0.beton.md5", "set/train-x/0.beton", "top.beton"] {
        kit.server.bucket.put(other, vec![1]);
    }
    kit.server.bucket.put("set/train-10.beton", contents(10));

    let shards = kit.open();

    let found =
        ["train-0", "train-1", "train-10"].map(|name| format!("s3://bucket/set/{name}.beton"));
    assert_eq!(names(&shards), found);
    assert!(shards.is_remote());
}

#[test]
fn a_folder_or_a_single_object_can_be_the_source() {
    let kit = Kit::new(2, 2);
    kit.server.bucket.put("set/README.md", vec![1]);
    let open = |key: &str| ShardSet::open(&format!("s3://{BUCKET}/{key}"), &kit.options).unwrap();

    assert_eq!(open("set/").len(), 2);
    assert_eq!(names(&open("set/train-1.beton")), ["s3://bucket/set/train-1.beton"]);
    assert_eq!(open("s?t/*-[01].beton").len(), 2);
}

#[test]
fn files_are_found_by_path_folder_pattern_and_url() {
    let folder = TempDir::new().unwrap();
    for shard in [1, 0] {
        fs::write(folder.path().join(format!("train-{shard}.beton")), contents(shard)).unwrap();
    }
    fs::write(folder.path().join("notes.txt"), "").unwrap();
    let options = Options::new("/never/used", 0);
    let folder = folder.path().to_str().unwrap();
    for source in [
        folder.to_owned(),
        format!("{folder}/"),
        format!("{folder}/train-*.beton"),
        format!("file://{folder}/train-?.beton"),
    ] {
        let shards = ShardSet::open(&source, &options).unwrap();
        assert_eq!(shards.samples().unwrap(), [1000, 1001], "{source}");
        assert!(!shards.is_remote());
        assert_eq!(fs::read(shards.local(1).unwrap()).unwrap(), contents(1));
    }
    let error = ShardSet::open(&format!("{folder}/trian-*.beton"), &options).unwrap_err();
    assert!(error.to_string().contains("has \"train-0.beton\", \"train-1.beton\""), "{error}");
    let error = ShardSet::open(&format!("{folder}/nowhere/x.beton"), &options).unwrap_err();
    assert!(error.to_string().contains(&format!("{folder} has")), "{error}");
}

#[test]
fn samples_are_counted_by_reading_headers_only() {
    let kit = Kit::new(3, 3);
    let shards = kit.open();
    kit.proxy.clear_log();

    assert_eq!(shards.samples().unwrap(), [1000, 1001, 1002]);

    let log = kit.proxy.log();
    assert_eq!(log.len(), 3);
    assert!(log.iter().all(|request| request.range == Some((0, 23))), "{log:#?}");
}

#[test]
fn a_shard_that_is_not_a_beton_file_is_reported() {
    let kit = Kit::new(2, 2);
    kit.server.bucket.put(&key(1), b"\x03\0".repeat(40));

    let error = kit.open().samples().unwrap_err();

    assert!(matches!(error, Error::File { fault: FileFault::Version(3), .. }), "{error}");
    assert!(error.to_string().starts_with("s3://bucket/set/train-1.beton: "), "{error}");
}

#[test]
fn if_nothing_matches_the_message_lists_existing_names() {
    let kit = Kit::new(2, 2);
    let message = |source: &str| ShardSet::open(source, &kit.options).unwrap_err().to_string();

    assert_eq!(
        message("s3://bucket/set/trian-*.beton"),
        "nothing matches \"s3://bucket/set/trian-*.beton\": \
         s3://bucket/set has \"train-0.beton\", \"train-1.beton\""
    );
    assert_eq!(
        message("s3://bucket/sett/train-0.beton"),
        "nothing matches \"s3://bucket/sett/train-0.beton\": s3://bucket/ has \"set/\""
    );
}

#[test]
fn wrong_credentials_give_one_clear_error_immediately() {
    let mut kit = Kit::new(1, 1);
    for (name, value) in [("AWS_SECRET_ACCESS_KEY", "wrong"), ("AWS_ACCESS_KEY_ID", "nobody")] {
        kit.options.environment.push((name.to_owned(), value.to_owned()));
        kit.proxy.clear_log();

        let error = ShardSet::open(&source(), &kit.options).unwrap_err();

        assert!(matches!(error, Error::Store { remedy: Remedy::Credentials, .. }), "{error:?}");
        let message = error.to_string();
        assert!(
            message.starts_with("cannot list s3://bucket/set: the store responded with"),
            "{message}"
        );
        assert!(
            message.contains("1 attempt in") && message.contains("AWS_ACCESS_KEY_ID"),
            "{message}"
        );
        assert_eq!(kit.proxy.log().len(), 1);
    }
}

#[test]
fn missing_credentials_and_role_are_reported() {
    let mut kit = Kit::new(1, 1);
    let closed_port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    kit.options.environment.retain(|(name, _)| name == "AWS_ENDPOINT_URL");
    let metadata = ("AWS_METADATA_ENDPOINT".to_owned(), format!("http://{closed_port}"));
    kit.options.environment.push(metadata);

    let error = ShardSet::open(&source(), &kit.options).unwrap_err();

    assert!(matches!(error, Error::Store { remedy: Remedy::Credentials, .. }), "{error:?}");
    assert!(error.to_string().contains("no credentials are set"), "{error}");
    assert_eq!(kit.proxy.log().len(), 0);
}

#[test]
fn a_missing_bucket_is_reported_immediately() {
    let kit = Kit::new(1, 1);

    let error = ShardSet::open("s3://date/set/*.beton", &kit.options).unwrap_err();

    assert!(matches!(error, Error::Store { remedy: Remedy::Path, attempts: 1, .. }), "{error:?}");
    assert!(error.to_string().contains("NoSuchBucket"), "{error}");
}

#[test]
fn an_unreachable_store_is_an_error_after_a_few_attempts() {
    let mut kit = Kit::new(1, 1);
    // A port that was just closed.
    let closed_port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    kit.options.environment.push(("AWS_ENDPOINT_URL".to_owned(), format!("http://{closed_port}")));

    let error = ShardSet::open(&source(), &kit.options).unwrap_err();

    assert!(
        matches!(error, Error::Store { remedy: Remedy::Network, attempts: 3, .. }),
        "{error:?}"
    );
    assert!(error.to_string().contains("refused"), "{error}");
}

#[test]
fn a_shard_larger_than_the_cache_is_refused_before_training() {
    let mut kit = Kit::new(1, 1);
    kit.options.cache_bytes -= 1;

    let error = ShardSet::open(&source(), &kit.options).unwrap_err();

    assert_eq!(
        error.to_string(),
        "s3://bucket/set/train-0.beton has 200000 bytes, but the shard cache may hold only 199999: \
         raise data.cache_gib to twice the largest shard or more, or write smaller shards"
    );
}
