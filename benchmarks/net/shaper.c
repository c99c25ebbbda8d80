/* A network hop between two namespaces: rate, one-way delay, jitter, queue and loss, per direction.
 *
 *     shaper NAMESPACE_A DEVICE_A NAMESPACE_B DEVICE_B SEED
 *
 * Opens a TUN device in each namespace and forwards packets between them. Prints "ready" once both
 * exist. Reads commands from standard input, one per line, and ends with its end:
 *
 *     rate BITS_PER_SECOND [DIRECTION]     0: unlimited
 *     delay NANOSECONDS [DIRECTION]        added to the transmission time
 *     jitter NANOSECONDS [DIRECTION]       at most this, uniformly at random per packet, is added too
 *     queue BYTES [DIRECTION]              packets beyond these, while they wait, are dropped
 *     loss PROBABILITY [DIRECTION]         0 to 1, independently per packet
 *     down [DIRECTION], up [DIRECTION]     a link that is down drops all packets, those under way too
 *     block [DIRECTION], admit [DIRECTION] drop packets that open TCP connections, as a firewall does
 *     stats                                prints one line of counters per direction
 *
 * DIRECTION is ab or ba; both by default. A packet is transmitted at the rate after the packets
 * before it, then travels for the delay and its jitter. The order of packets is kept: a packet that
 * would overtake an earlier one arrives together with that.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

enum { MAX_PACKET = 65536, MAX_PACKETS = 1 << 16, MAX_COMMAND = 256 };

struct packet {
    uint64_t due; /* time of arrival, ns; set when the transmission ends */
    uint32_t size;
    unsigned char *data;
};

struct direction {
    const char *name;
    int source, target;
    struct packet ring[MAX_PACKETS];
    uint32_t head, middle, tail; /* [head, middle) travels, [middle, tail) waits or is transmitted */
    uint64_t transmission_end;   /* of the packet at `middle`, ns */
    uint64_t last_due, rate, delay, jitter, queue, waiting;
    double loss;
    int is_down, is_blocked;
    uint64_t num_packets, num_bytes, num_lost, num_overflown, num_cut, num_blocked;
};

static struct direction directions[2];

static void fail(const char *action) {
    perror(action);
    exit(1);
}

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static int open_tun(const char *namespace, const char *device) {
    char path[512];
    struct ifreq request;
    int place, tun;
    snprintf(path, sizeof path, "/run/netns/%s", namespace);
    if ((place = open(path, O_RDONLY | O_CLOEXEC)) < 0) fail(path);
    if (setns(place, CLONE_NEWNET)) fail("setns");
    close(place);
    if ((tun = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC)) < 0) fail("/dev/net/tun");
    memset(&request, 0, sizeof request);
    request.ifr_flags = IFF_TUN | IFF_NO_PI;
    strncpy(request.ifr_name, device, IFNAMSIZ - 1);
    if (ioctl(tun, TUNSETIFF, &request)) fail("TUNSETIFF");
    return tun;
}

static struct packet *at(struct direction *way, uint32_t index) {
    return &way->ring[index % MAX_PACKETS];
}

static uint64_t transmission_ns(const struct direction *way, uint32_t size) {
    return way->rate ? (uint64_t)((double)size * 8e9 / (double)way->rate) : 0;
}

static void start_transmission(struct direction *way, uint64_t begin) {
    way->transmission_end = begin + transmission_ns(way, at(way, way->middle)->size);
}

/* True for the first packet of a TCP connection: SYN without ACK. */
static int opens_connection(const unsigned char *data, uint32_t size) {
    uint32_t header = size ? 4u * (data[0] & 15) : 0;
    if (size < 20 || data[0] >> 4 != 4 || data[9] != IPPROTO_TCP || size < header + 14) return 0;
    return (data[header + 13] & 0x12) == 0x02;
}

/* Take a packet from the source device, or drop it. */
static void accept_packet(struct direction *way, const unsigned char *data, uint32_t size) {
    struct packet *packet = at(way, way->tail);
    if (way->is_down) { way->num_cut++; return; }
    if (way->is_blocked && opens_connection(data, size)) { way->num_blocked++; return; }
    if (way->loss > 0 && drand48() < way->loss) { way->num_lost++; return; }
    if (way->waiting + size > way->queue || way->tail - way->head == MAX_PACKETS) {
        way->num_overflown++;
        return;
    }
    if (!(packet->data = malloc(size))) fail("malloc");
    memcpy(packet->data, data, size);
    packet->size = size;
    way->waiting += size;
    if (way->tail++ == way->middle) start_transmission(way, now_ns());
}

static void read_packets(struct direction *way) {
    static unsigned char buffer[MAX_PACKET];
    ssize_t size;
    int count;
    for (count = 0; count < 256 && (size = read(way->source, buffer, sizeof buffer)) > 0; count++)
        accept_packet(way, buffer, (uint32_t)size);
}

/* End the transmissions and deliver the packets whose time has come. */
static void forward(struct direction *way, uint64_t now) {
    while (way->middle != way->tail && way->transmission_end <= now) {
        struct packet *packet = at(way, way->middle++);
        packet->due = way->transmission_end + way->delay;
        if (way->jitter) packet->due += (uint64_t)(drand48() * (double)way->jitter);
        if (packet->due < way->last_due) packet->due = way->last_due;
        way->last_due = packet->due;
        way->waiting -= packet->size;
        if (way->middle != way->tail) start_transmission(way, way->transmission_end);
    }
    while (way->head != way->middle && at(way, way->head)->due <= now) {
        struct packet *packet = at(way, way->head++);
        if (write(way->target, packet->data, packet->size) == (ssize_t)packet->size) {
            way->num_packets++;
            way->num_bytes += packet->size;
        } else {
            way->num_lost++;
        }
        free(packet->data);
    }
}

static void cut(struct direction *way) {
    way->is_down = 1;
    for (; way->head != way->tail; way->head++, way->num_cut++) free(at(way, way->head)->data);
    way->middle = way->tail;
    way->waiting = 0;
}

static uint64_t next_event(void) {
    uint64_t next = UINT64_MAX;
    for (struct direction *way = directions; way < directions + 2; way++) {
        if (way->middle != way->tail && way->transmission_end < next) next = way->transmission_end;
        if (way->head != way->middle && at(way, way->head)->due < next)
            next = at(way, way->head)->due;
    }
    return next;
}

static void apply(struct direction *way, const char *command, double value) {
    if (!strcmp(command, "rate")) way->rate = (uint64_t)value;
    else if (!strcmp(command, "delay")) way->delay = (uint64_t)value;
    else if (!strcmp(command, "jitter")) way->jitter = (uint64_t)value;
    else if (!strcmp(command, "queue")) way->queue = (uint64_t)value;
    else if (!strcmp(command, "loss")) way->loss = value;
    else if (!strcmp(command, "down")) cut(way);
    else if (!strcmp(command, "up")) way->is_down = 0;
    else if (!strcmp(command, "block")) way->is_blocked = 1;
    else if (!strcmp(command, "admit")) way->is_blocked = 0;
    else if (!strcmp(command, "stats"))
        printf("%s packets %" PRIu64 " bytes %" PRIu64 " lost %" PRIu64 " overflown %" PRIu64
               " cut %" PRIu64 " blocked %" PRIu64 "\n",
               way->name, way->num_packets, way->num_bytes, way->num_lost, way->num_overflown,
               way->num_cut, way->num_blocked);
    else fprintf(stderr, "unknown command: %s\n", command);
}

static void run_command(char *line) {
    char *words[3] = {strtok(line, " "), strtok(NULL, " "), strtok(NULL, " ")};
    if (!words[0]) return;
    static const char *const switches[] = {"down", "up", "block", "admit"};
    int is_switch = 0;
    for (int i = 0; i < 4; i++) is_switch |= !strcmp(words[0], switches[i]);
    const char *only = is_switch ? words[1] : words[2];
    double value = words[1] && !is_switch ? atof(words[1]) : 0;
    for (struct direction *way = directions; way < directions + 2; way++)
        if (!only || !strcmp(only, way->name)) apply(way, words[0], value);
}

static void read_commands(void) {
    static char buffer[MAX_COMMAND];
    static size_t used;
    ssize_t size = read(0, buffer + used, sizeof buffer - used - 1);
    char *end;
    if (size <= 0) exit(0);
    used += (size_t)size;
    buffer[used] = 0;
    while ((end = strchr(buffer, '\n'))) {
        *end = 0;
        used -= (size_t)(end + 1 - buffer);
        char rest[MAX_COMMAND];
        memcpy(rest, end + 1, used + 1);
        run_command(buffer);
        memcpy(buffer, rest, used + 1);
        puts("ok");
    }
    if (used == sizeof buffer - 1) used = 0;
    fflush(stdout);
}

int main(int argc, char **argv) {
    if (argc != 6) {
        fprintf(stderr, "usage: shaper NAMESPACE_A DEVICE_A NAMESPACE_B DEVICE_B SEED\n");
        return 2;
    }
    int a = open_tun(argv[1], argv[2]), b = open_tun(argv[3], argv[4]);
    int timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    if (timer < 0) fail("timerfd_create");
    srand48(atol(argv[5]));
    prctl(PR_SET_TIMERSLACK, 1000);
    for (int i = 0; i < 2; i++) {
        directions[i].name = i ? "ba" : "ab";
        directions[i].source = i ? b : a;
        directions[i].target = i ? a : b;
        directions[i].queue = 1 << 20;
    }
    puts("ready");
    fflush(stdout);
    for (;;) {
        struct pollfd polled[4] = {{a, POLLIN, 0}, {b, POLLIN, 0}, {timer, POLLIN, 0}, {0, POLLIN, 0}};
        uint64_t next = next_event(), fired;
        /* An absolute time of 0 would disarm the timer; UINT64_MAX means that nothing is under way. */
        struct itimerspec spec = {{0, 0}, {0, 0}};
        if (next != UINT64_MAX) {
            spec.it_value.tv_sec = (time_t)(next / 1000000000u);
            spec.it_value.tv_nsec = (long)(next % 1000000000u);
        }
        timerfd_settime(timer, TFD_TIMER_ABSTIME, &spec, NULL);
        if (poll(polled, 4, -1) < 0 && errno != EINTR) fail("poll");
        if (polled[3].revents) read_commands();
        if (polled[2].revents && read(timer, &fired, sizeof fired) < 0 && errno != EAGAIN) fail("timer");
        if (polled[0].revents) read_packets(&directions[0]);
        if (polled[1].revents) read_packets(&directions[1]);
        uint64_t now = now_ns();
        forward(&directions[0], now);
        forward(&directions[1], now);
    }
}
