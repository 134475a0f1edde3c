//! Settings: defaults, and errors that name their keys.

use super::*;

pub(super) fn flags() -> Flags {
    Flags { model: vec!["/models/tiny".into()], pki: Some("/pki".into()), served_model_name: vec!["tiny".into()], ..Flags::default() }
}

#[test]
fn defaults_are_filled_in() {
    let settings = flags().check().unwrap();
    assert_eq!((settings.http.port(), settings.requests.body_bytes_max), (8000, 32 << 20));
    assert_eq!(settings.cluster.id_base & 0xffff_ffff, 0);
}

#[test]
fn usage_goes_somewhere_from_a_disk_and_encrypted() {
    let of = |file: &str, data: bool| {
        let usage_sink = toml::from_str::<Flags>(&format!("[usage_sink]\n{file}")).unwrap().usage_sink;
        let checked = Flags { usage_sink, data: data.then(|| "/data".into()), ..flags() }.check();
        checked.map(|settings| settings.usage_sink.map(|sink| sink.source)).map_err(|error| error.to_string())
    };
    assert_eq!(of("url = 'https://books.example/usage'", true), Ok(Some("coordinator-0".into())));
    for (file, data, words) in [("url = 'https://books.example/'", false, "--data"), ("url = 'http://books.example/'", true, "https")] {
        let error = of(file, data).unwrap_err();
        assert!(error.contains("usage_sink") && error.contains(words), "{error}");
    }
}

#[test]
fn an_error_names_its_key() {
    for (flags, key) in [
        (Flags { model: Vec::new(), ..flags() }, "--model"),
        (Flags { pki: None, ..flags() }, "--pki"),
        (Flags { body_bytes_max: Some("8MB".into()), ..flags() }, "body_bytes_max"),
        (Flags { queue_max: Some(0), ..flags() }, "queue_max"),
        (Flags { policy: Some("best".into()), ..flags() }, "`policy` = best"),
        (Flags { connections_max: Some(usize::MAX), ..flags() }, "connections_max"),
        (Flags { connections_per_address_max: Some(0), ..flags() }, "connections_per_address_max"),
        (Flags { bodies_bytes_max: Some("1MiB".into()), ..flags() }, "bodies_bytes_max"),
        (Flags { body_timeout_s: Some(0), ..flags() }, "body_timeout_s"),
        (Flags { idle_timeout_s: Some(0), ..flags() }, "idle_timeout_s"),
        (Flags { idle_timeout_s: Some(u64::MAX), ..flags() }, "idle_timeout_s"),
        (Flags { served_model_name: Vec::new(), ..flags() }, "`model` = /models/tiny"),
        (Flags { request_timeout_s: Some(0), ..flags() }, "request_timeout_s"),
        (Flags { aliases: parse_aliases("gpt-5=big").ok(), ..flags() }, "`aliases` = gpt-5=big"),
        (Flags { store_days: Some(u64::MAX), ..flags() }, "store_days"),
        (Flags { replay_bytes_max: Some("64MB".into()), ..flags() }, "replay_bytes_max"),
        (Flags { response_cache_bytes_max: Some("64MB".into()), ..flags() }, "response_cache_bytes_max"),
        (Flags { response_cache_keep_s: Some(0), ..flags() }, "response_cache_keep_s"),
        (Flags { replay_answers_max: Some(0), ..flags() }, "replay_answers_max"),
        (Flags { replay_keep_s: Some(0), ..flags() }, "replay_keep_s"),
        (Flags { store_bytes_max: Some("1MiB".into()), ..flags() }, "store_bytes_max"),
        (Flags { conversation_bytes_max: Some("1kiB".into()), ..flags() }, "conversation_bytes_max"),
        (Flags { conversation_bytes_max: Some("1023KiB".into()), ..flags() }, "conversation_bytes_max"),
        (Flags { store: Some("postgres://me@localhost/x?sslmode=perhaps".into()), ..flags() }, "sslmode"),
        (Flags { admin: Some(([0, 0, 0, 0], 9100).into()), ..flags() }, "admin_public"),
        (Flags { tls_cert: Some("cert.pem".into()), ..flags() }, "tls_key"),
        (Flags { quota_share: Some("2/2".into()), ..flags() }, "quota_share"),
        (Flags { batch_bytes_max: Some("0".into()), ..flags() }, "batch_bytes_max"),
        (Flags { batch_concurrency: Some(0), ..flags() }, "batch_concurrency"),
        (Flags { batch_days: Some(0), ..flags() }, "batch_days"),
        (Flags { probe_every_s: Some(u64::MAX), ..flags() }, "probe_every_s"),
        (Flags { autoscale: "prefill=1..4,decode=0..4".parse().ok(), ..flags() }, "autoscale.decode"),
        (Flags { audit: "30".parse().ok(), ..flags() }, "--data"),
        (Flags { audit: "40000".parse().ok(), data: Some("/data".into()), ..flags() }, "audit.days"),
        (Flags { probe_every_s: Some(9), probe_tolerance: Some(f32::NAN), ..flags() }, "probe_tolerance"),
        (Flags { usage_segment_bytes: Some("1KiB".into()), ..flags() }, "usage_segment_bytes"),
    ] {
        let error = flags.check().unwrap_err().to_string();
        assert!(error.contains(key), "{error}");
    }
}
