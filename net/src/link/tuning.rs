//! Settings of every connection.
//!
//! No path MTU is assumed. A connection starts with the datagram size that QUIC guarantees and probes for larger ones (DPLPMTUD,
//! RFC 8899), up to the UDP maximum: 64 KiB on loopback, 9 KB with jumbo frames, 1.4 KB on the internet. When large datagrams stop
//! arriving, the connection falls back.

use super::{IDLE_MAX, socket::BUFFER_BYTES};
use std::sync::Arc;

/// The size that every path must carry (RFC 9000, section 14).
pub(super) const DATAGRAM_BYTES_MIN: u16 = 1_200;
/// The largest UDP payload that fits an IPv4 packet.
pub(super) const DATAGRAM_BYTES_MAX: u16 = 65_507;

/// The most bytes that a peer may have in flight: no more than a socket buffer holds, since a fast path would lose the rest and send it
/// again. It allows 400 MB/s per connection at a round trip of 10 ms.
const WINDOW_BYTES: u32 = BUFFER_BYTES as u32;

/// Bytes in flight before the first acknowledgement. Probes count: with a window smaller than the largest probe, all data behind one, even
/// the close of the connection, would wait until the probe is acknowledged or lost.
const INITIAL_WINDOW_BYTES: u64 = 4 * DATAGRAM_BYTES_MAX as u64;

pub(super) fn transport(datagram_bytes_max: u16) -> quinn::TransportConfig {
    let mut discovery = quinn::MtuDiscoveryConfig::default();
    discovery.upper_bound(datagram_bytes_max);
    let mut congestion = quinn::congestion::CubicConfig::default();
    congestion.initial_window(INITIAL_WINDOW_BYTES);
    let mut config = quinn::TransportConfig::default();
    config.congestion_controller_factory(Arc::new(congestion));
    config.mtu_discovery_config(Some(discovery));
    config.max_idle_timeout(Some(IDLE_MAX.try_into().expect("seconds fit a QUIC timeout")));
    config.keep_alive_interval(Some(IDLE_MAX / 4));
    config.stream_receive_window(WINDOW_BYTES.into());
    config.receive_window(WINDOW_BYTES.into());
    config.send_window(64 << 20);
    config.max_concurrent_bidi_streams(64u32.into());
    config.max_concurrent_uni_streams(64u32.into());
    config
}

pub(super) fn endpoint(datagram_bytes_max: u16) -> quinn::EndpointConfig {
    let mut config = quinn::EndpointConfig::default();
    config.max_udp_payload_size(datagram_bytes_max).expect("at least what QUIC demands");
    config
}
