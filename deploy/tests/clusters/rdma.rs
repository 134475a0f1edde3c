//! A whole cluster whose blocks are transferred by RDMA gives the same tokens. It needs the RDMA guest: `make test-rdma`.

use crate::support::{Cluster, DISAGGREGATED, SHORT_OF_MEMORY, assert_same, complete_all, mixed_cases, reference_with, reusable};

const MOVED: &str = "tidemill_kv_transfer_bytes_total";

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs the RDMA guest"]
async fn outputs_over_rdma_are_those_of_one_worker_alone() {
    let cases = mixed_cases(27);
    let threads = &["--threads", "1"];
    let reference = reference_with(threads, &cases).await;
    // The guest has little memory.
    let devices = ["--transport", "rdma", "--rdma-devices", "ra0,ra1", "--pool-rdma-devices", "rb0,rb1", "--pool-memory", "64MiB"];
    let cluster = Cluster::start(&[DISAGGREGATED, SHORT_OF_MEMORY, &devices].concat());
    assert_same(&reference, &complete_all(&cluster, &cases, 2).await, &cases, "rdma, cold");
    let warm = complete_all(&cluster, &cases, 2).await;
    assert_same(&reference, &warm, &cases, "rdma, cached");
    for (answer, case) in warm.iter().zip(&cases) {
        assert_eq!(answer.cached(), reusable(case), "nothing is computed twice: {}", answer.usage);
    }
    cluster.reported().await;
    for (transport, moved) in [("rdma", true), ("shm", false), ("quic", false)] {
        for direction in ["put", "get"] {
            let labels = [format!("transport=\"{transport}\""), format!("direction=\"{direction}\"")];
            let bytes = cluster.metric(MOVED, &labels).await;
            assert_eq!(bytes > 0.0, moved, "{transport} {direction}: {bytes} bytes");
        }
    }
    assert_eq!(cluster.metric("tidemill_kv_rails_lost_total", &[]).await, 0.0);
    cluster.stop();
}
